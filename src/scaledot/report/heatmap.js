// The large map of the chosen head, with labels, zoom and a cursor.
const LABEL = 15; // pixels that a label needs

// The part that is seen, in cells.
const view = { x: 0, y: 0, width: COLUMNS, height: ROWS };
let cursor = null; // { row, column } under the pointer or moved by keys
let painted = null; // the whole map with one pixel a cell

const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

function paint() {
  const { image, largest } = picture(matrixNow(), Number($("stretch").value), hiddenNow);
  painted = document.createElement("canvas");
  painted.width = image.width;
  painted.height = image.height;
  painted.getContext("2d").putImageData(image, 0, 0);
  $("most").textContent = number(largest);
  $("heat-title").textContent = capital(headName(state.layer, state.head));
  $("layer").value = state.layer;
  $("head").value = state.head;
  const strip = $("ramp").getContext("2d"),
    line = new ImageData(256, 1);
  ramp().forEach((colour, i) => line.data.set([...colour, 255], 4 * i));
  strip.putImageData(line, 0, 0);
  $("map").setAttribute(
    "aria-label",
    `Weights of ${headName(state.layer, state.head)}, ${ROWS} queries by ${COLUMNS} keys`,
  );
  drawMap();
}

function drawMap() {
  const canvas = $("map");
  const width = canvas.clientWidth;
  if (!width || !painted) return;
  const height = Math.round(width * clamp(ROWS / COLUMNS, 0.25, 1));
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  context.drawImage(painted, view.x, view.y, view.width, view.height, 0, 0, width, height);
  const cell = { x: width / view.width, y: height / view.height };
  const outline = (row, column, rows, columns, colour, thickness) => {
    context.strokeStyle = colour;
    context.lineWidth = thickness;
    context.strokeRect(
      (column - view.x) * cell.x,
      (row - view.y) * cell.y,
      columns * cell.x,
      rows * cell.y,
    );
  };
  const colours = getComputedStyle(document.documentElement);
  const chosen = isDark() ? "#ff9e5e" : "#c2410c";
  outline(state.token, view.x - 1, 1, view.width + 2, chosen, 1.5);
  if (!SAME_TEXT) outline(view.y - 1, state.key, view.height + 2, 1, chosen, 1);
  if (cursor) {
    outline(cursor.row, cursor.column, 1, 1, isDark() ? "#000" : "#fff", 4);
    outline(cursor.row, cursor.column, 1, 1, colours.color || "#888", 2);
  }
  canvas.classList.toggle("zoomed", view.width < COLUMNS || view.height < ROWS);
  drawLabels(cell);
}

// A token, or where a range of them begins: on an axis the next label says where it ends.
const axisName = (name) => (EXACT ? shown(name) : rangeOf(name).split("–")[0]);

// As many labels as have room, evenly spaced.
function drawLabels(cell) {
  const sides = [
    [
      "query-labels",
      D.queries,
      view.y,
      view.height,
      cell.y,
      "top",
      cursor ? cursor.row : state.token,
    ],
    ["key-labels", D.keys, view.x, view.width, cell.x, "left", cursor ? cursor.column : state.key],
  ];
  for (const [id, names, start, length, size, edge, chosen] of sides) {
    const every = Math.max(1, Math.ceil(LABEL / size));
    const spans = [];
    for (
      let i = Math.ceil(start / every) * every;
      i < Math.min(names.length, start + length);
      i += every
    ) {
      const at = (i - start + 0.5) * size;
      if (at < 6 || at > length * size - 6) continue;
      const span = make(
        "span",
        { dir: "auto", className: i === chosen ? "chosen" : "" },
        axisName(names[i]),
      );
      span.style[edge] = `${at}px`;
      spans.push(span);
    }
    $(id).replaceChildren(...spans);
  }
}

// Room for labels: as much as the longest needs, but not more than a third of the page.
function measureLabels() {
  const probe = document.createElement("canvas").getContext("2d");
  probe.font = `bold 12px ${getComputedStyle(document.body).fontFamily}`;
  const widest = (most, name) =>
    Math.max(most, probe.measureText(axisName(name).slice(0, 40)).width);
  const longest = (names) => names.reduce(widest, 0);
  const most = Math.min(130, $("plot").clientWidth * 0.28);
  const root = $("plot").style;
  root.setProperty("--left", `${Math.ceil(Math.min(most, longest(D.queries) + 12))}px`);
  root.setProperty("--top", `${Math.ceil(Math.min(most, longest(D.keys) + 12))}px`);
}

// The key with the largest weight in a row; -1 where there is none.
function peakOf(row) {
  let best = -1;
  for (let j = 0; j < COLUMNS; j++) {
    if (weightNow(row, j) > 0 && (best < 0 || weightNow(row, j) > weightNow(row, best))) best = j;
  }
  return best;
}

// What the chosen query looks at most.
function chosenText() {
  const name = quoted(queryName(state.token)),
    best = peakOf(state.token);
  if (best >= 0) {
    const weight = number(weightNow(state.token, best), 4);
    return `${name} looks most at ${quoted(keyName(best))}: ${weight}`;
  }
  const row = matrixNow().subarray(state.token * COLUMNS, (state.token + 1) * COLUMNS);
  return row.some(Number.isNaN) ? `${name} has weights that are nan` : `${name} sees no key`;
}

// What is under the cursor.
function cursorText({ row, column }) {
  const from = `${quoted(queryName(row))} (query ${row})`;
  const who = `${from} → ${quoted(keyName(column))} (key ${column})`;
  if (hiddenNow(row, column)) return `${who}: not seen`;
  const weight = weightNow(row, column);
  let rank = 1;
  for (let j = 0; j < COLUMNS; j++) if (weightNow(row, j) > weight) rank += 1;
  const what = EXACT ? "weight" : "share of the weight";
  return `${who}: ${what} ${number(weight, 4)}, rank ${rank} of ${COLUMNS}`;
}

const read = () => ($("readout").textContent = cursor ? cursorText(cursor) : chosenText());

function zoom(factor, centre) {
  const at = centre || cursor || { row: state.token, column: Math.max(0, state.key) };
  for (const [from, size, whole, point] of [
    ["x", "width", COLUMNS, at.column + 0.5],
    ["y", "height", ROWS, at.row + 0.5],
  ]) {
    const least = Math.min(4, whole);
    const next = clamp(view[size] / factor, least, whole);
    const share = clamp((point - view[from]) / view[size], 0, 1);
    view[from] = clamp(point - share * next, 0, whole - next);
    view[size] = next;
  }
  drawMap();
}

function wholeMap() {
  Object.assign(view, { x: 0, y: 0, width: COLUMNS, height: ROWS });
  drawMap();
}

function cellAt(event) {
  const box = $("map").getBoundingClientRect();
  return {
    row: clamp(
      Math.floor(view.y + ((event.clientY - box.top) / box.height) * view.height),
      0,
      ROWS - 1,
    ),
    column: clamp(
      Math.floor(view.x + ((event.clientX - box.left) / box.width) * view.width),
      0,
      COLUMNS - 1,
    ),
  };
}

function moveCursor(to) {
  cursor = to;
  if (to) {
    view.x = clamp(view.x, to.column + 1 - view.width, to.column);
    view.y = clamp(view.y, to.row + 1 - view.height, to.row);
  }
  drawMap();
  read();
}

function mapKeys(event) {
  const from = cursor || { row: state.token, column: Math.max(0, state.key) };
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (event.key in moves) {
    const [down, right] = moves[event.key];
    moveCursor({
      row: clamp(from.row + down, 0, ROWS - 1),
      column: clamp(from.column + right, 0, COLUMNS - 1),
    });
  } else if (event.key === "Enter" || event.key === " ") choose(from);
  else if (event.key === "+" || event.key === "=") zoom(1.5);
  else if (event.key === "-") zoom(1 / 1.5);
  else if (event.key === "0") wholeMap();
  else if (event.key === "Escape") moveCursor(null);
  else return;
  event.preventDefault();
}

const choose = ({ row, column }) =>
  change(SAME_TEXT ? { token: row } : { token: row, key: column });

// Dragging moves a part of the map; a press without a move chooses a cell.
function mapPointer(canvas) {
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, y: event.clientY, view: { ...view }, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held && event.buttons) {
      const dx = event.clientX - held.x,
        dy = event.clientY - held.y;
      held.moved ||= Math.hypot(dx, dy) > 5;
      if (held.moved) {
        view.x = clamp(
          held.view.x - (dx / canvas.clientWidth) * view.width,
          0,
          COLUMNS - view.width,
        );
        view.y = clamp(
          held.view.y - (dy / canvas.clientHeight) * view.height,
          0,
          ROWS - view.height,
        );
        drawMap();
        return;
      }
    }
    const at = cellAt(event);
    if (!cursor || cursor.row !== at.row || cursor.column !== at.column) moveCursor(at);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && !held.moved) choose(cellAt(event));
    held = null;
  });
  canvas.addEventListener("pointercancel", () => {
    held = null;
  });
  canvas.addEventListener("pointerleave", () => {
    held = null;
    moveCursor(null);
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      // Without the focus the wheel goes on scrolling the page.
      if (document.activeElement !== canvas && !event.ctrlKey) return;
      event.preventDefault();
      zoom(event.deltaY < 0 ? 1.25 : 0.8, cellAt(event));
    },
    { passive: false },
  );
}

function drawReceived() {
  const rows = D.received[state.layer][state.head].map(([index, token, mean]) => [
    EXACT || token === String(index)
      ? shown(token)
      : `${index.toLocaleString("en")}: ${shown(token)}`,
    mean,
  ]);
  const table = make("table", {});
  weightTable(table, "Keys that receive most, mean weight over all queries", "key", rows, "weight");
  $("received").replaceChildren(table);
}

function buildMap() {
  const options = (count, names) =>
    Array.from({ length: count }, (_, i) =>
      make("option", { value: i }, names ? `${i}: ${names[i]}` : `${i}`),
    );
  const telling = D.names.some((name, i) => !name.endsWith(` ${i}`));
  $("layer").append(...options(NUM_LAYERS, telling ? D.names : null));
  $("head").append(...options(D.numHeads));
  $("layer").addEventListener("change", (event) => change({ layer: Number(event.target.value) }));
  $("head").addEventListener("change", (event) => change({ head: Number(event.target.value) }));
  $("stretch").addEventListener("change", paint);
  $("in").addEventListener("click", () => zoom(1.5));
  $("out").addEventListener("click", () => zoom(1 / 1.5));
  $("all").addEventListener("click", wholeMap);
  $("map").addEventListener("keydown", mapKeys);
  mapPointer($("map"));
  $("stretch").value = EXACT ? "1" : "0.5";
  document.querySelector(".hidden-key").hidden = !EXACT;
  measureLabels();
  new ResizeObserver(() =>
    requestAnimationFrame(() => {
      measureLabels();
      drawMap();
    }),
  ).observe($("plot"));
}
