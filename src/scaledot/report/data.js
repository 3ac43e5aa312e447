// What the page knows: labels, and the weights of every head as codes.
const D = JSON.parse(document.getElementById("data").textContent);
const EXACT = D.kind === "weights"; // else block maps
const NUM_LAYERS = D.layers.length;
const ROWS = D.queries.length;
const COLUMNS = D.keys.length;
// Index of the first query among the keys; null where keys are another text or bins do not match.
const OFFSET = EXACT || D.offset === 0 ? D.offset : null;
const SAME_TEXT = OFFSET === 0 && ROWS === COLUMNS;
const EXCLUDED = 65535;
const NOT_A_NUMBER = 65534;

const decoded = [];

// Codes of a layer, (heads, rows, columns) in C order.
function codesOf(layer) {
  if (!decoded[layer]) {
    const raw = atob(D.layers[layer].codes);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    // Little-endian, as every processor that runs a browser today.
    decoded[layer] = EXACT ? new Uint16Array(bytes.buffer) : bytes;
  }
  return decoded[layer];
}

const place = (head, row) => (head * ROWS + row) * COLUMNS;

const isHidden = (layer, head, row, column) =>
  EXACT && codesOf(layer)[place(head, row) + column] === EXCLUDED;

// Weights of one row at a multiple of the scale: w^c / sum of w^c, the sink's share included.
function rowOf(layer, head, row, scale = 1, out = new Float64Array(COLUMNS), at = 0) {
  const codes = codesOf(layer);
  const step = D.layers[layer].steps[head];
  const start = place(head, row);
  if (!EXACT) {
    for (let j = 0; j < COLUMNS; j++) out[at + j] = codes[start + j] ** 2 * step;
    return out;
  }
  let least = NOT_A_NUMBER;
  for (let j = 0; j < COLUMNS; j++) least = Math.min(least, codes[start + j]);
  let total = 0;
  for (let j = 0; j < COLUMNS; j++) {
    const code = codes[start + j];
    const value = code < NOT_A_NUMBER ? Math.exp(-scale * step * (code - least)) : 0;
    out[at + j] = code === NOT_A_NUMBER ? NaN : value;
    total += value;
  }
  const rest = D.rests[layer] ? D.rests[layer][head][row] : 0;
  if (rest > 0) total += Math.exp(scale * (Math.log(rest) + step * least));
  if (total > 0) for (let j = 0; j < COLUMNS; j++) out[at + j] /= total;
  return out;
}

function matrixOf(layer, head, scale = 1) {
  const out = new Float64Array(ROWS * COLUMNS);
  for (let i = 0; i < ROWS; i++) rowOf(layer, head, i, scale, out, i * COLUMNS);
  return out;
}

// Means over the queries that see something: entropy, largest weight, sum of w (1 - w).
function figuresOf(layer, head, scale) {
  const matrix = matrixOf(layer, head, scale);
  const sums = { entropy: 0, largest: 0, gradient: 0 };
  let count = 0;
  for (let i = 0; i < ROWS; i++) {
    let entropy = 0,
      largest = 0,
      gradient = 0;
    for (let j = i * COLUMNS; j < (i + 1) * COLUMNS; j++) {
      const w = matrix[j];
      if (!(w > 0)) continue;
      entropy -= w * Math.log(w);
      gradient += w * (1 - w);
      largest = Math.max(largest, w);
    }
    if (!largest) continue;
    count += 1;
    sums.entropy += entropy;
    sums.largest += largest;
    sums.gradient += gradient;
  }
  for (const name of Object.keys(sums)) sums[name] /= Math.max(1, count);
  return sums;
}

// Key that stands at a query's place, and the other way round; -1 where there is none.
const keyOf = (row) => (OFFSET === null ? -1 : row + OFFSET);
const queryOf = (column) =>
  OFFSET === null || column < OFFSET || column - OFFSET >= ROWS ? -1 : column - OFFSET;

// Marks of a model's own, such as [CLS] or </s>, and punctuation: heads rest on them.
const isMark = (token) => /^(\[[^\]]+\]|<[^>]+>|\p{P}+|\s*)$/u.test(token.trim());

// A label that shows what cannot be seen.
const shown = (label) => {
  if (label === "") return "∅";
  return label.trim() === ""
    ? label.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\s/g, "␣")
    : label.replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥");
};
// Where a bin starts and ends, without its first token.
const rangeOf = (label) => label.split(":", 1)[0];

const queryName = (row) => shown(D.queries[row]);
const keyName = (column) => shown(D.keys[column]);
