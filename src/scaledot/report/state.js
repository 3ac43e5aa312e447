// What is chosen; it is kept in the address, so that a head can be linked.
const state = { layer: 0, head: 0, token: 0, key: 0, scale: 1 };
const LIMITS = { layer: NUM_LAYERS, head: D.numHeads, token: ROWS, key: COLUMNS };
const watchers = [];

// Call `f(state, changed)` after a change of any of the names, or of the theme.
const watch = (names, f) => watchers.push({ names: [...names, "theme"], f });

function change(patch) {
  const changed = new Set();
  const full = { ...patch };
  if ("token" in full && !("key" in full) && keyOf(full.token) >= 0) full.key = keyOf(full.token);
  for (const [name, value] of Object.entries(full)) {
    if (state[name] !== value) changed.add(name);
    state[name] = value;
  }
  if (!changed.size) return;
  const parts = Object.entries(state).filter(
    ([name]) => name !== "key" || keyOf(state.token) !== state.key,
  );
  // Chromium limits how often an address may change; the last change arrives.
  clearTimeout(change.timer);
  change.timer = setTimeout(() => {
    history.replaceState(
      null,
      "",
      `#${parts.map(([k, v]) => `${k}=${k === "scale" ? +v.toPrecision(3) : v}`).join("&")}`,
    );
  }, 100);
  notify(changed);
}

function notify(changed) {
  for (const { names, f } of watchers) if (names.some((name) => changed.has(name))) f(changed);
}

// What the address asks for, as far as it makes sense.
function asked() {
  const found = {};
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    const value = Number(text);
    if (
      name in LIMITS &&
      text !== "" &&
      Number.isInteger(value) &&
      value >= 0 &&
      value < LIMITS[name]
    )
      found[name] = value;
    if (name === "scale" && EXACT && value >= 0.1 && value <= 10) found.scale = value;
  }
  return found;
}

let current = { at: "", matrix: null };

// Weights of the chosen head at the chosen scale, computed once.
function matrixNow() {
  const at = [state.layer, state.head, state.scale].join();
  if (current.at !== at) current = { at, matrix: matrixOf(state.layer, state.head, state.scale) };
  return current.matrix;
}

const weightNow = (row, column) => matrixNow()[row * COLUMNS + column];
const hiddenNow = (row, column) => isHidden(state.layer, state.head, row, column);
