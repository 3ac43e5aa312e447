// Small parts of the page.
const $ = (id) => document.getElementById(id);

// An element with properties (`data` and `aria` are objects) and children; text is only text.
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "aria")
      for (const [k, v] of Object.entries(value)) element.setAttribute(`aria-${k}`, v);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function number(x, digits = 3) {
  if (x === null || Number.isNaN(x)) return "nan";
  if (x === 0 || Math.abs(x) >= 10 ** -digits) {
    return x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }
  return x.toExponential(1);
}

const quoted = (name) => `“${name}”`;
const headName = (layer, head) => `layer ${layer}, head ${head}`;
const capital = (text) => text[0].toUpperCase() + text.slice(1);

let speaking = 0;

// Tell a screen reader, once the person pauses.
function say(text) {
  clearTimeout(speaking);
  speaking = setTimeout(() => {
    $("live").textContent = text;
  }, 150);
}

// Arrow keys, Home and End move the focus among items laid out in rows of `width`.
function steps(event, index, count, width) {
  const last = count - 1,
    rowStart = index - (index % width);
  const targets = {
    ArrowRight: Math.min(last, index + 1),
    ArrowLeft: Math.max(0, index - 1),
    ArrowDown: index + width <= last ? index + width : index,
    ArrowUp: index - width >= 0 ? index - width : index,
    Home: event.ctrlKey ? 0 : rowStart,
    End: event.ctrlKey ? last : Math.min(last, rowStart + width - 1),
  };
  return targets[event.key] ?? -1;
}

// Rows of a table sorted by weight, as [name, weight].
function weightTable(table, caption, header, pairs, unit = EXACT ? "weight" : "share") {
  const largest = pairs.length ? Math.max(pairs[0][1], 1e-300) : 1;
  const body = pairs.map(([name, weight], i) => {
    const bar = make("span", {});
    bar.style.width = `${(100 * weight) / largest}%`;
    return make(
      "tr",
      {},
      make("td", { className: "number" }, `${i + 1}`),
      make("td", { className: "token", dir: "auto" }, name),
      make("td", { className: "number" }, number(weight, 4)),
      make("td", { className: "bar", aria: { hidden: "true" } }, bar),
    );
  });
  const heading = (text, className = "") => make("th", { scope: "col", className }, text);
  table.replaceChildren(
    make("caption", {}, caption),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        heading("rank", "number"),
        heading(header),
        heading(unit, "number"),
        make("td", { aria: { hidden: "true" } }),
      ),
    ),
    make("tbody", {}, ...body),
  );
}
