// The slider: the softmax anew at a multiple of the scale, and how it saturates.
const POINTS = 33;
const CURVE = { width: 420, height: 190, left: 30, right: 8, top: 8, bottom: 26 };
const SERIES = [
  ["one", "entropy", "entropy, nats"],
  ["two", "largest", "largest weight"],
  ["three", "gradient", "gradient Σ w (1 − w)"],
];

const WHY =
  "Scores are Q·K times a scale, 1/√d unless a model has its own; here it is ×1. Larger scores " +
  "push weights to 0 and 1, where the gradient is lost.";
const NOT_QUITE =
  "Scores here hold more than Q·K (a bias, a soft cap, sinks or a function): the slider divides " +
  "their sum by a temperature, which is not quite another scale.";
const NO_SLIDER =
  "This page holds block maps, not every weight, and those cannot be scaled. Make a report of a " +
  "part of the input to use the slider.";

const scaleText = (scale) => `×${scale.toLocaleString("en", { maximumSignificantDigits: 3 })}`;
const svg = (tag, attributes, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const curveX = (scale) =>
  CURVE.left + ((CURVE.width - CURVE.left - CURVE.right) * (Math.log10(scale) + 1)) / 2;
const curveY = (share) => CURVE.top + (CURVE.height - CURVE.top - CURVE.bottom) * (1 - share);

function buildScale() {
  if (!EXACT) {
    $("scale").append(make("p", { className: "quiet" }, NO_SLIDER));
    return;
  }
  const input = make("input", {
    type: "range",
    id: "scale-input",
    min: -1,
    max: 1,
    step: 0.01,
    value: 0,
    aria: { describedby: "scale-note" },
  });
  input.addEventListener("input", () => change({ scale: 10 ** Number(input.value) }));
  const reset = make("button", { type: "button", id: "scale-reset" }, "Back to ×1");
  reset.addEventListener("click", () => change({ scale: 1 }));
  const note = D.plain
    ? "The slider changes the large map, the lists and the shades, exactly as another scale would."
    : NOT_QUITE;
  const figures = SERIES.map(([name, id, text]) =>
    make("div", { className: name }, make("dt", {}, text), make("dd", { id: `figure-${id}` })),
  );
  const left = make(
    "div",
    {},
    make("p", { className: "quiet", id: "scale-note" }, `${WHY} ${note}`),
    make(
      "div",
      { className: "line" },
      make("label", { htmlFor: "scale-input" }, "Scale ", make("strong", { id: "scale-text" })),
      reset,
    ),
    input,
    make(
      "div",
      { className: "ticks", aria: { hidden: "true" } },
      make("span", {}, "×0.1 even"),
      make("span", {}, "×1"),
      make("span", {}, "×10 saturated"),
    ),
    make("dl", { className: "figures" }, ...figures),
  );
  $("scale").append(make("div", { className: "scale" }, left, make("div", { id: "curve" })));
}

function drawCurve() {
  if (!EXACT) return;
  const scales = Array.from({ length: POINTS }, (_, i) => 10 ** (-1 + (2 * i) / (POINTS - 1)));
  const points = scales.map((scale) => figuresOf(state.layer, state.head, scale));
  const evenly = Math.log(Math.max(2, D.summary.visible[state.layer][state.head] || COLUMNS));
  const share = {
    entropy: (p) => p.entropy / evenly,
    largest: (p) => p.largest,
    gradient: (p) => p.gradient,
  };
  const paths = SERIES.map(([name, id]) =>
    svg("path", {
      class: name,
      d: points
        .map((p, i) => [curveX(scales[i]), curveY(clamp(share[id](p), 0, 1))])
        .map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`)
        .join(""),
    }),
  );
  const grid = [0, 0.5, 1].flatMap((y) => [
    svg("line", { x1: CURVE.left, x2: CURVE.width - CURVE.right, y1: curveY(y), y2: curveY(y) }),
    svg("text", { x: CURVE.left - 6, y: curveY(y) + 4, "text-anchor": "end" }, `${y}`),
  ]);
  const ticks = [0.1, 0.3, 1, 3, 10].map((x) =>
    svg(
      "text",
      {
        x: curveX(x),
        y: CURVE.height - 8,
        "text-anchor": x === 10 ? "end" : "middle",
      },
      `×${x}`,
    ),
  );
  $("curve").replaceChildren(
    svg(
      "svg",
      {
        class: "curve",
        viewBox: `0 0 ${CURVE.width} ${CURVE.height}`,
        role: "img",
        "aria-label":
          "Entropy (1 is that of even weights), largest weight and gradient over the scale",
      },
      ...grid,
      ...ticks,
      ...paths,
      svg("line", { class: "now", id: "now", y1: CURVE.top, y2: CURVE.height - CURVE.bottom }),
    ),
    make(
      "p",
      { className: "caption" },
      "Over the scale: entropy (line, 1 = even weights), largest weight (dashes), gradient (dots).",
    ),
  );
}

function drawScale() {
  if (!EXACT) return;
  const figures = figuresOf(state.layer, state.head, state.scale);
  for (const [, id] of SERIES) $(`figure-${id}`).textContent = number(figures[id]);
  const text = scaleText(state.scale);
  $("scale-text").textContent = text;
  const input = $("scale-input");
  input.value = Math.log10(state.scale);
  input.setAttribute("aria-valuetext", `${text.slice(1)} times the scale`);
  $("now").setAttribute("x1", curveX(state.scale));
  $("now").setAttribute("x2", curveX(state.scale));
}
