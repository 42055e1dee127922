// ---- The loss of all groups, with the syncs.
let cursor = null; // the batch under the pointer
const RULE =
  "A vertical line is a sync. It gives all groups the same parameters, so they move apart before it and are together after it. " +
  "A spread that does not shrink at a sync means that the groups do not exchange; with few inner steps in a round, chance alone makes most of it.";
const syncsOf = (status) => list(status.syncs).filter((sync) => isNumber(sync.batch) && isNumber(sync.outer_step));
function changesOf(status, syncs) {
  // where a change of the settings took effect
  return list(status.settings_changes)
    .filter((change) => isNumber(change.outer_step))
    .map((change) => ({ ...change, batch: syncs.find((sync) => sync.outer_step >= change.outer_step)?.batch }))
    .filter((change) => isNumber(change.batch));
}
function curvesOf(losses, order, since) {
  return order.map((id) => {
    // a batch that a resume repeated counts once
    const points = list(losses[id]).filter((point) => isNumber(point[0]) && point[0] >= since);
    return [...new Map(points.map(([x, y]) => [x, isNumber(y) ? y : null]))].sort((a, b) => a[0] - b[0]);
  });
}
// What the chart shows: curves, syncs, the batch under the pointer, and each curve's value there.
function lossView(status, losses, order) {
  const all = syncsOf(status),
    most = $("range").value === "all" ? all.length : +$("range").value;
  const syncs = all.slice(-most),
    since = syncs.length < all.length ? syncs[0].batch : -Infinity;
  const curves = curvesOf(losses, order, since),
    steps = curves.flat().map((point) => point[0]);
  const [low, high] = extent(
      curves
        .flat()
        .map((point) => point[1])
        .filter(isNumber),
    ),
    [earliest, last] = extent(steps);
  const nearest = (a, b) => (Math.abs(b - cursor) < Math.abs(a - cursor) ? b : a);
  const at = cursor == null || !steps.length ? null : steps.reduce(nearest);
  const ends = curves.map((curve) => curve.filter(([x, y]) => y != null && (at == null || x <= at)).pop());
  const first = since > 0 || (earliest > last / 2 && earliest < last) ? earliest : Math.min(0, earliest);
  const width = Math.max(240, $("chart").clientWidth),
    height = width < 500 ? 220 : 285;
  return {
    order,
    syncs,
    curves,
    steps,
    ends,
    at,
    low,
    high,
    first,
    last,
    width,
    height,
    left: 48,
    right: width - 28,
    top: 14,
    bottom: height - 40,
    changes: changesOf(status, syncs),
    isLog: low > 0 && high / low >= 8,
  };
}
function drawLosses(status, losses, order) {
  const view = lossView(status, losses, order),
    { at, ends, isLog } = view;
  show(
    $("h-loss"),
    "Loss of all groups ",
    h(
      "span",
      {},
      status.goodput ? "· mean of each round " : null,
      isLog ? "· logarithmic " : null,
      at == null ? null : `· at batch ${number(at)}`,
    ),
  );
  show($("rule"), view.syncs.length ? RULE : null);
  if (view.low > view.high) {
    // no loss at all
    show($("legend"));
    show($("spread"));
    return show($("chart"), h("p", { class: "muted" }, "No loss reported yet."));
  }
  show(
    $("legend"),
    order.map((id, i) => h("li", {}, sample(i), "group ", nameOf(id), " ", h("strong", {}, lossOf(ends[i]?.[1])))),
  );
  const x = scaleOf(view.first, view.last, view.left, view.right);
  show($("chart"), lossChart(view, x));
  drawSpread(view, x);
  listenToChart(view, (batch) => {
    cursor = batch;
    drawLosses(status, losses, order);
  });
}
function lossChart(view, x) {
  const { order, curves, ends, at, width, height, left, right, top, bottom, isLog } = view;
  const scale = isLog ? Math.log : (v) => v,
    back = isLog ? Math.exp : (v) => v;
  const pad = (scale(view.high) - scale(view.low)) * 0.05 || (isLog ? 0.1 : Math.abs(view.high) * 0.1 || 1);
  const low = back(scale(view.low) - pad),
    high = back(scale(view.high) + pad),
    y = scaleOf(low, high, bottom, top, scale);
  const yTicks = isLog ? logTicks(low, high, 7) : ticks(low, high, 5),
    xTicks = ticks(view.first, view.last, Math.min(8, width / 110));
  const says = (id, end) => (end ? `group ${id} ${lossOf(end[1])} at ${number(end[0])}` : `group ${id} none`);
  const label = `Loss over batches: ${order.map((id, i) => says(id, ends[i])).join("; ")}. ${plural(view.syncs.length, "sync")}.`;
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label },
    syncMarks(view, x),
    yTicks.map((v) => [
      line("grid", left, y(v), right, y(v)),
      svg("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, shortNumber(v)),
    ]),
    xTicks
      .filter(Number.isInteger)
      .map((v) => [
        line("grid", x(v), bottom, x(v), bottom + 5),
        svg("text", { x: x(v), y: bottom + 18, "text-anchor": "middle" }, number(v)),
      ]),
    svg("text", { x: (left + right) / 2, y: height - 5, "text-anchor": "middle" }, "batch"),
    at == null ? null : line("cursor", x(at), top, x(at), bottom),
    curves.map((points, i) => [
      svg("path", { class: "curve", d: pathOf(points, x, y), ...stroke(i) }),
      ends[i] ? svg("circle", { cx: x(ends[i][0]), cy: y(ends[i][1]), r: 3, style: `fill: var(--s${i % 8})` }) : null,
    ]),
  );
}
// A line for each sync, or a tick at the bottom where lines would be too close to each other.
function syncMarks({ syncs, changes, left, right, top, bottom }, x) {
  const seen = syncs.filter((sync) => x(sync.batch) >= left && x(sync.batch) <= right),
    isClose = seen.length * 5 > right - left;
  const every = Math.ceil((seen.length * 2) / (right - left)) || 1;
  return [
    seen
      .filter((_, i) => i % every === 0)
      .map(({ batch }) => line("sync", x(batch), isClose ? bottom - 8 : top, x(batch), bottom)),
    changes.map((change) => [
      line("change", x(change.batch), top, x(change.batch), bottom),
      svg("text", { class: "changed", x: x(change.batch), y: top - 3, "text-anchor": "middle" }, `v${change.version}`),
    ]),
  ];
}
function listenToChart({ steps, at, first, last, left, right }, move) {
  const all = [...new Set(steps)].sort((a, b) => a - b),
    chart = $("chart");
  chart.onpointermove = (event) =>
    move(first + ((event.clientX - chart.getBoundingClientRect().left - left) / (right - left)) * (last - first));
  chart.onpointerleave = chart.onblur = () => move(null);
  chart.onkeydown = (event) => {
    const here = at == null ? all.length : all.indexOf(at);
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: all.length - 1, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(to === null ? null : all[Math.min(all.length - 1, Math.max(0, to))]);
  };
}
