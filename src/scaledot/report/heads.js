// The grid of all heads, a small map each.
const THUMB = 36; // pixels of a thumbnail, at most

const thumbs = []; // [index] of { button, canvas, layer, head }

function buildHeads() {
  const heads = Array.from({ length: D.numHeads }, (_, h) => h);
  const top = make(
    "tr",
    { role: "row" },
    make(
      "th",
      { className: "corner", role: "columnheader" },
      make("span", { className: "unseen" }, "layer"),
    ),
    ...heads.map((h) =>
      make("th", { scope: "col", role: "columnheader", title: `head ${h}` }, `${h}`),
    ),
  );
  const body = D.names.map((name, layer) =>
    make(
      "tr",
      { role: "row" },
      make("th", { scope: "row", role: "rowheader", title: name }, `${layer}`),
      ...heads.map((head) => {
        const canvas = make("canvas", {});
        const button = make(
          "button",
          {
            type: "button",
            tabIndex: -1,
            title: capital(headName(layer, head)),
            role: "gridcell",
            aria: { label: `${headName(layer, head)}, ${name}`, selected: "false" },
          },
          canvas,
        );
        thumbs.push({ button, canvas, layer, head });
        return make("td", { role: "none" }, button);
      }),
    ),
  );
  const table = make(
    "table",
    { className: "heads", role: "grid", aria: { label: "Layers and heads" } },
    make("thead", { role: "rowgroup" }, top),
    make("tbody", { role: "rowgroup" }, ...body),
  );
  table.addEventListener("click", (event) => {
    const found = thumbs.find((t) => t.button === event.target.closest("button"));
    if (found) change({ layer: found.layer, head: found.head });
  });
  table.addEventListener("keydown", (event) => {
    const index = thumbs.findIndex((t) => t.button === document.activeElement);
    const target = index < 0 ? -1 : steps(event, index, thumbs.length, D.numHeads);
    if (target < 0) return;
    event.preventDefault();
    thumbs[target].button.focus();
    change({ layer: thumbs[target].layer, head: thumbs[target].head });
  });
  $("heads").append(table);
}

function drawThumbs() {
  for (const { canvas, layer, head } of thumbs) {
    const { image } = picture(
      matrixOf(layer, head),
      0.6,
      (i, j) => isHidden(layer, head, i, j),
      THUMB,
    );
    canvas.width = image.width;
    canvas.height = image.height;
    canvas.getContext("2d").putImageData(image, 0, 0);
  }
}

function markHead() {
  for (const { button, layer, head } of thumbs) {
    const chosen = layer === state.layer && head === state.head;
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  }
}
