// The text: what the chosen token looks at, who looks at it, and heads that link it to others.
const PRONOUNS = /^[\sĠ▁]*(it|he|she|they|him|her|them|this|that|which|who|its|his|their)$/i;
const MOST_LINKS = 6;

const texts = []; // { side: "query" | "key", chips }
let looking = "row"; // chips are shaded by what the token looks at, or by who looks at it

function chipLine(side, names, label) {
  const chips = names.map((name, i) =>
    make(
      "button",
      {
        type: "button",
        className: "chip",
        role: "option",
        dir: "auto",
        tabIndex: -1,
        title: `${name}: ${side} ${i}`,
        aria: { selected: "false" },
      },
      name,
    ),
  );
  const line = make(
    "div",
    {
      className: `chips${names.length > 80 || !EXACT ? " small" : ""}`,
      role: "listbox",
      aria: { label, orientation: "horizontal" },
    },
    ...chips,
  );
  const choose = (i) => change(side === "query" ? { token: i } : { key: i });
  line.addEventListener("click", (event) => {
    const i = chips.indexOf(event.target.closest(".chip"));
    if (i >= 0) choose(i);
  });
  line.addEventListener("keydown", (event) => {
    const target = steps(event, chips.indexOf(document.activeElement), chips.length, 1);
    if (target < 0) return;
    event.preventDefault();
    choose(event.key === "Home" ? 0 : event.key === "End" ? chips.length - 1 : target);
    chips[side === "query" ? state.token : state.key].focus();
  });
  texts.push({ side, chips });
  return line;
}

function buildTexts() {
  const unit = EXACT ? "token" : "range of tokens";
  $("prompt").textContent = `Choose a ${unit}: the others are shaded by weight in the chosen head.`;
  const where = $("texts");
  if (SAME_TEXT) {
    where.append(chipLine("query", D.queries.map(shown), "The text"), lookingButtons());
    return;
  }
  const caption = (text) => make("div", { className: "caption" }, text);
  where.append(
    caption("Queries, which look, shaded by their weight on the chosen key"),
    chipLine("query", D.queries.map(shown), "Queries"),
    caption("Keys, which are looked at, shaded by the weight of the chosen query"),
    chipLine("key", D.keys.map(shown), "Keys"),
  );
}

function lookingButtons() {
  const buttons = [
    ["row", "what it looks at"],
    ["column", "who looks at it"],
  ].map(([name, text]) => {
    const pressed = String(name === looking);
    return make("button", { type: "button", data: { name }, aria: { pressed } }, text);
  });
  const group = make(
    "div",
    { className: "buttons controls", role: "group", aria: { label: "Shade by" } },
    ...buttons,
  );
  group.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    looking = button.dataset.name;
    for (const b of buttons) b.setAttribute("aria-pressed", String(b === button));
    shade();
  });
  return group;
}

function shade() {
  const weights = {
    row: Array.from({ length: COLUMNS }, (_, j) => weightNow(state.token, j)),
    column: Array.from({ length: ROWS }, (_, i) => weightNow(i, state.key)),
  };
  for (const { side, chips } of texts) {
    const by = SAME_TEXT ? looking : side === "query" ? "column" : "row";
    const chosen = side === "query" ? state.token : state.key;
    chips.forEach((chip, i) => {
      chip.style.setProperty("--weight", Math.sqrt(weights[by][i] || 0).toFixed(4));
      chip.setAttribute("aria-selected", String(i === chosen));
      chip.tabIndex = i === chosen ? 0 : -1;
    });
  }
  const sorted = (values, name) =>
    values
      .map((w, i) => [name(i), w])
      .filter(([, w]) => w > 0)
      .sort((a, b) => b[1] - a[1]);
  const from = `${quoted(queryName(state.token))} looks at (${headName(state.layer, state.head)})`;
  weightTable($("row"), from, "key", sorted(weights.row, keyName));
  const to = `${quoted(keyName(state.key))} is looked at by`;
  weightTable($("column"), to, "query", sorted(weights.column, queryName));
}

// For one query, the strongest key of each head: not itself, not a neighbour, not a mark.
function linksOf(row) {
  const self = keyOf(row),
    found = [];
  for (let layer = 0; layer < NUM_LAYERS; layer++) {
    for (let head = 0; head < D.numHeads; head++) {
      const weights = rowOf(layer, head, row);
      let best = -1;
      for (let j = 0; j < COLUMNS; j++) {
        const near = self >= 0 && Math.abs(j - self) <= 1;
        const skipped = near || (EXACT ? isMark(D.keys[j]) : j === 0);
        if (!skipped && weights[j] > 0 && (best < 0 || weights[j] > weights[best])) best = j;
      }
      if (best >= 0) found.push({ layer, head, key: best, weight: weights[best] });
    }
  }
  return found.sort((a, b) => b.weight - a.weight);
}

function linkList(links) {
  const items = links.slice(0, MOST_LINKS).map(({ layer, head, key, weight }) => {
    const pressed = String(layer === state.layer && head === state.head);
    const button = make(
      "button",
      { type: "button", aria: { pressed }, data: { layer, head } },
      make("span", { className: "to", dir: "auto" }, `→ ${keyName(key)}`),
      make("span", { className: "value" }, number(weight)),
      make("span", {}, headName(layer, head)),
    );
    button.addEventListener("click", () => {
      change(SAME_TEXT ? { layer, head } : { layer, head, key });
      // The list is drawn anew: the focus goes to the button that took this one's place.
      const same = `button[data-layer="${layer}"][data-head="${head}"]`;
      $("links").querySelector(same)?.focus();
    });
    return make("li", {}, button);
  });
  return make("ul", { className: "links" }, ...items);
}

function drawLinks() {
  const name = queryName(state.token),
    self = keyOf(state.token);
  $("links-title").textContent = `Heads that link ${quoted(name)} to …`;
  const own = self < 0 ? "" : "itself, its neighbours, ";
  const left = own + (EXACT ? "marks such as [CLS] and punctuation" : "the very first range");
  $("links-note").textContent =
    `The largest weight of each head from here, leaving out ${left}. Choose one to see its map.`;
  const links = linksOf(state.token);
  const groups =
    self < 0
      ? [["", links]]
      : [
          ["Before it", links.filter((l) => l.key < self)],
          ["After it", links.filter((l) => l.key > self)],
        ];
  const parts = groups
    .filter(([, list]) => list.length)
    .flatMap(([title, list]) => [title && make("h3", {}, title), linkList(list)].filter(Boolean));
  $("links").replaceChildren(
    ...(parts.length ? parts : [make("p", {}, "No head looks at another word from here.")]),
  );
}

// Where to begin: at a pronoun and the head that most links it to an earlier word.
function beginning() {
  const pronoun = D.queries.findIndex((token) => PRONOUNS.test(token));
  const token = EXACT && pronoun >= 0 ? pronoun : Math.floor(ROWS / 2);
  const links = linksOf(token);
  const first = links.find((link) => keyOf(token) < 0 || link.key < keyOf(token)) || links[0];
  const start = first ? { layer: first.layer, head: first.head, token } : { token };
  return keyOf(token) < 0 && first ? { ...start, key: first.key } : start;
}
