// Findings in words, and the table of all heads.
const COLUMNS_OF_SUMMARY = [
  ["entropy", "entropy"],
  ["max_weight", "largest weight"],
  ["saturation", "saturation"],
  ["mean_distance", "distance"],
  ["sink_mass", "first key, sink"],
];

let sorting = { name: "", down: true };

function visit(layer, head) {
  change({ layer, head });
  $("heat").focus({ preventScroll: true });
  $("heat").scrollIntoView();
  say(capital(headName(layer, head)));
}

function buildFindings() {
  const kinds = new Map();
  for (const finding of D.findings)
    kinds.set(finding.kind, [...(kinds.get(finding.kind) || []), finding]);
  if (!kinds.size) {
    const told = D.kinds.filter((kind) => !(kind in D.unknown));
    const none = told.length ? `No head is found to be one of: ${told.join(", ")}.` : "";
    $("findings").append(make("p", {}, none));
  }
  const groups = [...kinds].map(([kind, list], i) => {
    const items = list.map(({ layer, head, reason }) => {
      const button = make("button", { type: "button" }, `Layer ${layer}, head ${head}`);
      button.addEventListener("click", () => visit(layer, head));
      return make("li", {}, button, make("span", {}, reason));
    });
    return make(
      "details",
      { open: i === 0 && list.length <= 12 },
      make("summary", {}, `${capital(kind)}: ${list.length} ${list.length > 1 ? "heads" : "head"}`),
      make("ul", { className: "found" }, ...items),
    );
  });
  $("findings").append(...groups);
  for (const reason of new Set(Object.values(D.unknown))) {
    const some = Object.keys(D.unknown).filter((kind) => D.unknown[kind] === reason);
    $("findings").append(make("p", {}, `Could not be told: ${some.join(", ")} (${reason}).`));
  }
}

function sortedHeads() {
  const places = thumbs.map(({ layer, head }) => ({ layer, head }));
  const { name, down } = sorting;
  if (!name) return places;
  const value = (p) => D.summary[name][p.layer][p.head] ?? -Infinity;
  return places.sort((a, b) => (down ? value(b) - value(a) : value(a) - value(b)));
}

function drawSummary() {
  const heading = ([name, text]) => {
    const sorted = sorting.name === name;
    const button = make(
      "button",
      { type: "button" },
      sorted ? `${text} ${sorting.down ? "▾" : "▴"}` : text,
    );
    button.addEventListener("click", () => {
      sorting = { name, down: sorted ? !sorting.down : true };
      drawSummary();
      $("summary").querySelector("th[aria-sort] button").focus();
    });
    const aria = sorted ? { sort: sorting.down ? "descending" : "ascending" } : {};
    return make("th", { scope: "col", className: "number", aria }, button);
  };
  const rows = sortedHeads().map(({ layer, head }) => {
    const button = make(
      "button",
      { type: "button", aria: { label: capital(headName(layer, head)) } },
      `${layer} · ${head}`,
    );
    button.addEventListener("click", () => visit(layer, head));
    return make(
      "tr",
      { data: { layer, head } },
      make("td", {}, button),
      ...COLUMNS_OF_SUMMARY.map(([name]) =>
        make("td", { className: "number" }, number(D.summary[name][layer][head])),
      ),
    );
  });
  $("summary").replaceChildren(
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        make("th", { scope: "col" }, "layer · head"),
        ...COLUMNS_OF_SUMMARY.map(heading),
      ),
    ),
    make("tbody", {}, ...rows),
  );
  markRow();
}

function markRow() {
  for (const row of $("summary").querySelectorAll("tbody tr")) {
    row.classList.toggle(
      "chosen",
      Number(row.dataset.layer) === state.layer && Number(row.dataset.head) === state.head,
    );
  }
}
