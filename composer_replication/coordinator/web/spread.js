// ---- What a sync makes of the distance between the groups' losses: the numbers of the rule.
const dash = (look) =>
  svg(
    "svg",
    { class: "sample", viewBox: "0 0 26 8", "aria-hidden": "true" },
    svg("line", { class: look, x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 2.5 }),
  );
function drawSpread({ syncs, left, right, width, first }, x) {
  const [top, bottom, height] = [16, 76, 84];
  const before = syncs.map((sync) => [sync.batch, sync.loss_spread_before ?? null]);
  // A sync reports the spread after the one before it.
  const after = syncs.map((sync, i) => [syncs[i - 1]?.batch ?? sync.batch, sync.loss_spread_after ?? null]);
  const window = Math.ceil(syncs.length / 40),
    smooth = [before, after].map((points) => smoothed(points, window));
  const values = smooth
    .flat()
    .map(([, v]) => v)
    .filter(isNumber);
  if (values.length < 4) return show($("spread"));
  const most = Math.max(...values) || 1,
    y = scaleOf(0, most, bottom, top),
    count = Math.max(1, Math.ceil(syncs.length / 4));
  const mean = (points) => lossOf(smoothed(points.slice(-count), count).pop()[1]);
  const how = `means of the last ${plural(count, "sync")}`,
    running = window > 1 ? `; lines: running means of ${window}` : "";
  const label = `Spread before a sync ${mean(before)}, after it ${mean(after)}, ${how}.`;
  show(
    $("spread"),
    h(
      "div",
      { class: "pairs" },
      h("span", {}, dash("before"), "spread before a sync ", h("strong", {}, mean(before))),
      h("span", {}, dash("after"), "after it ", h("strong", {}, mean(after))),
      h("span", { class: "how" }, `largest minus smallest loss, ${how}${running}`),
    ),
    svg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label },
      ticks(0, most, 2).map((v) => [
        line("grid", left, y(v), right, y(v)),
        svg("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, shortNumber(v)),
      ]),
      svg("path", { class: "curve before", d: pathOf(smooth[0], x, y) }),
      svg("path", {
        class: "curve after",
        d: pathOf(
          smooth[1].filter(([batch]) => batch >= first),
          x,
          y,
        ),
      }),
    ),
  );
}
function smoothed(points, window) {
  return points.map(([x], i) => {
    const near = points
      .slice(Math.max(0, i - window + 1), i + 1)
      .map(([, v]) => v)
      .filter(isNumber);
    return [x, near.length ? sum(near) / near.length : null];
  });
}
