// ---- What all charts are made of.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((nice) => nice * power >= rough * 0.999),
    first = Math.ceil(low / step - 1e-9);
  return Array.from(
    { length: Math.floor(high / step + 1e-9) - first + 1 },
    (_, i) => +((first + i) * step).toPrecision(12),
  );
}
function logTicks(low, high, count) {
  const least = Math.floor(Math.log10(low)),
    powers = Array.from({ length: Math.ceil(Math.log10(high)) - least + 1 }, (_, i) => least + i);
  const ofThese = (nices) =>
    powers.flatMap((power) => nices.map((nice) => +`${nice}e${power}`)).filter((tick) => tick >= low && tick <= high);
  const candidates = [[1, 2, 3, 5], [1, 2, 5], [1]].map(ofThese).find((some) => some.length <= count) || ofThese([1]);
  return candidates.filter((_, i) => i % Math.ceil(candidates.length / count) === 0);
}
const extent = (numbers) =>
  numbers.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
const shortNumber = (v) => (v !== 0 && (Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3) ? v.toExponential() : number(v, 6));
const line = (look, x1, y1, x2, y2) => svg("line", { class: look, x1, y1, x2, y2 });
// A path through points, with a gap where a value is missing.
const pathOf = (points, x, y) =>
  points
    .map(([at, value], k) => (value == null ? "" : `${points[k - 1]?.[1] == null ? "M" : "L"}${x(at)} ${y(value)}`))
    .join("");
// From values to pixels, rounded: the page is drawn again every second, and what is equal stays.
const scaleOf =
  (low, high, from, to, by = (v) => v) =>
  (v) =>
    +(from + ((by(v) - by(low)) / (by(high) - by(low) || 1)) * (to - from)).toFixed(1);

// A curve without axes, for a table. Its numbers stand beside it, so it is hidden from screen readers.
function sparkline(curves) {
  const width = 120,
    height = 28,
    xs = curves.flat().map(([x]) => x),
    ys = curves
      .flat()
      .map(([, y]) => y)
      .filter(isNumber);
  if (ys.length < 2) return null;
  const x = scaleOf(...extent(xs), 2, width - 2),
    [low, high] = extent(ys);
  const y = scaleOf(low, high === low ? low + 1 : high, height - 3, 3);
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    low < 0 && high > 0 ? line("grid", 0, y(0), width, y(0)) : null,
    curves.map((points, i) => svg("path", { class: `curve ${i ? "before" : "after"}`, d: pathOf(points, x, y) })),
  );
}
