// One ramp, even in lightness: from the card's colour to dark blue, or from dark to pale yellow.
const wantsDark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;

function isDark() {
  if (printing) return false;
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : wantsDark.matches;
}

// sRGB bytes of a colour given in Oklch, hue in degrees.
function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((x) => {
    const clipped = Math.min(1, Math.max(0, x));
    const curved = clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055;
    return Math.round(255 * curved);
  });
}

const ramps = {};

// 256 colours from weight 0 to the largest.
function ramp() {
  const name = isDark() ? "dark" : "light";
  ramps[name] ||= Array.from({ length: 256 }, (_, i) => {
    const t = i / 255;
    const bump = Math.sin(Math.PI * Math.min(1, 0.08 + 0.92 * t));
    return name === "dark"
      ? oklch(0.24 + 0.7 * t, 0.02 + 0.11 * bump, 265 - 165 * t)
      : oklch(0.985 - 0.73 * t, 0.135 * bump * Math.min(1, 2.2 * t) + 0.003, 248 + 16 * t);
  });
  return ramps[name];
}

// Off the blue ramp: beside small weights a grey would look like one of them.
const hiddenColour = () => (isDark() ? [43, 50, 60] : [235, 222, 196]);

// Place on the ramp, 0 to 255, of a weight; `power` 0 stands for four decades of a logarithm.
function level(weight, largest, power) {
  if (!(weight > 0) || !(largest > 0)) return 0;
  const share = Math.min(1, weight / largest);
  const stretched = power === 0 ? Math.max(0, 1 + Math.log10(share) / 4) : share ** power;
  return Math.round(255 * stretched);
}

// A picture of a matrix with one pixel a cell, or one for several, of which the largest counts.
function picture(matrix, power, hidden, most = Infinity) {
  const step = Math.max(1, Math.ceil(Math.max(ROWS, COLUMNS) / most));
  const width = Math.ceil(COLUMNS / step),
    height = Math.ceil(ROWS / step);
  const peaks = new Float64Array(width * height).fill(-1);
  let largest = 0;
  for (let i = 0; i < ROWS; i++) {
    for (let j = 0; j < COLUMNS; j++) {
      if (hidden(i, j)) continue;
      const at = Math.floor(i / step) * width + Math.floor(j / step);
      const value = matrix[i * COLUMNS + j];
      if (value > peaks[at]) peaks[at] = value;
      if (value > largest) largest = value;
    }
  }
  const image = new ImageData(width, height);
  const colours = ramp(),
    grey = hiddenColour();
  for (let k = 0; k < peaks.length; k++) {
    image.data.set(peaks[k] < 0 ? grey : colours[level(peaks[k], largest, power)], 4 * k);
    image.data[4 * k + 3] = 255;
  }
  return { image, largest };
}
