// Putting it together.
function describe() {
  const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
  $("title").textContent = shown(D.title || "Attention report");
  const length =
    D.lenQ === D.lenKv
      ? plural(D.lenQ, "token")
      : `${plural(D.lenQ, "query").replace("querys", "queries")}, ${plural(D.lenKv, "key")}`;
  const how = EXACT ? "every weight" : `block maps of ${ROWS} × ${COLUMNS}`;
  const heads = `${plural(NUM_LAYERS, "layer")} of ${plural(D.numHeads, "head")}`;
  $("facts").textContent = `${heads}, ${length}; ${how}. Layers and heads count from 0.`;
}

function followTheme() {
  const button = $("theme");
  const update = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    notify(new Set(["theme"]));
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    update();
  });
  wantsDark.addEventListener("change", update);
  addEventListener("beforeprint", () => {
    printing = true;
    update();
  });
  addEventListener("afterprint", () => {
    printing = false;
    update();
  });
  button.setAttribute("aria-pressed", String(isDark()));
}

describe();
buildTexts();
buildHeads();
buildMap();
buildScale();
buildFindings();
const wanted = asked();
change({ ...beginning(), ...wanted });

watch(["layer", "head", "token", "key", "scale"], shade);
watch(["layer", "head", "token"], drawLinks);
watch([], drawThumbs);
watch(["layer", "head"], markHead);
watch(["layer", "head", "scale"], paint);
watch(["token", "key"], drawMap);
watch(["layer", "head", "token", "key", "scale"], read);
watch(["layer", "head"], drawReceived);
watch(["layer", "head"], drawCurve);
watch(["layer", "head", "scale"], drawScale);
watch(["layer", "head"], markRow);
drawSummary();
followTheme();
notify(new Set(["theme"]));
addEventListener("hashchange", () => change(asked()));
