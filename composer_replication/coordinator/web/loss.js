// ---- The loss of all groups, with the syncs.
let cursor = null; // the batch under the pointer
const RULE = "A vertical line is a sync. It gives all groups the same parameters, so they move apart before it and are together after it. "
  + "A spread that does not shrink at a sync means that the groups do not exchange; with few inner steps in a round, chance alone makes most of it.";
const syncsOf = (status) => list(status.syncs).filter((sync) => isNumber(sync.batch) && isNumber(sync.outer_step));
function changesOf(status, syncs) { // where a change of the settings took effect
  return list(status.settings_changes).filter((change) => isNumber(change.outer_step)).map((change) =>
    ({ ...change, batch: syncs.find((sync) => sync.outer_step >= change.outer_step)?.batch })).filter((change) => isNumber(change.batch));
}
function curvesOf(losses, order, since) {
  return order.map((id) => { // a batch that a resume repeated counts once
    const points = list(losses[id]).filter((point) => isNumber(point[0]) && point[0] >= since);
    return [...new Map(points.map(([x, y]) => [x, isNumber(y) ? y : null]))].sort((a, b) => a[0] - b[0]);
  });
}
function drawLosses(status, losses, order) {
  const all = syncsOf(status), most = $("range").value === "all" ? all.length : +$("range").value;
  const syncs = all.slice(-most), since = syncs.length < all.length ? syncs[0].batch : -Infinity;
  const curves = curvesOf(losses, order, since), steps = curves.flat().map((point) => point[0]);
  const values = curves.flat().map((point) => point[1]).filter(isNumber), [least, most_] = extent(values);
  const isLog = least > 0 && most_ / least >= 8;
  const at = cursor == null || !steps.length ? null : steps.reduce((a, b) => (Math.abs(b - cursor) < Math.abs(a - cursor) ? b : a));
  const ends = curves.map((curve) => curve.filter(([x, y]) => y != null && (at == null || x <= at)).pop());
  show($("h-loss"), "Loss of all groups ", h("span", {}, status.goodput ? "· mean of each round " : null,
    isLog ? "· logarithmic " : null, at == null ? null : `· at batch ${number(at)}`));
  show($("rule"), all.length ? RULE : null);
  if (!values.length) { show($("legend")); show($("spread")); return show($("chart"), h("p", { class: "muted" }, "No loss reported yet.")); }
  show($("legend"), order.map((id, i) => h("li", {}, sample(i), "group ", nameOf(id), " ", h("strong", {}, lossOf(ends[i]?.[1])))));

  const [earliest, last] = extent(steps), width = Math.max(240, $("chart").clientWidth), height = width < 500 ? 220 : 285;
  const first = since > 0 || (earliest > last / 2 && earliest < last) ? earliest : Math.min(0, earliest);
  const place = { left: 48, right: width - 28, width, first, last, syncs, changes: changesOf(status, syncs) };
  const top = 14, bottom = height - 40, scale = isLog ? Math.log : (v) => v;
  const pad = (scale(most_) - scale(least)) * 0.05 || (isLog ? 0.1 : Math.abs(most_) * 0.1 || 1);
  const low = scale(least) - pad, high = scale(most_) + pad;
  const x = scaleOf(first, last, place.left, place.right);
  const y = (v) => +(bottom - ((scale(v) - low) / (high - low)) * (bottom - top)).toFixed(1);
  const yTicks = isLog ? logTicks(Math.exp(low), Math.exp(high), 7) : ticks(low, high, 5);
  const lines = curves.map((points, i) => [svg("path", { class: "curve", d: pathOf(points, x, y), ...stroke(i) }),
    ends[i] ? svg("circle", { cx: x(ends[i][0]), cy: y(ends[i][1]), r: 3, style: `fill: var(--s${i % 8})` }) : null]);
  const summary = order.map((id, i) => (ends[i] ? `group ${id} ${lossOf(ends[i][1])} at ${number(ends[i][0])}` : `group ${id} none`)).join("; ");
  show($("chart"), svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Loss over batches: ${summary}. ${plural(syncs.length, "sync")}.` },
    syncMarks(place, x, top, bottom),
    yTicks.map((v) => [line("grid", place.left, y(v), place.right, y(v)), svg("text", { x: place.left - 8, y: y(v) + 4, "text-anchor": "end" }, shortNumber(v))]),
    ticks(first, last, Math.min(8, width / 110)).filter(Number.isInteger).map((v) =>
      [line("grid", x(v), bottom, x(v), bottom + 5), svg("text", { x: x(v), y: bottom + 18, "text-anchor": "middle" }, number(v))]),
    svg("text", { x: (place.left + place.right) / 2, y: height - 5, "text-anchor": "middle" }, "batch"),
    at == null ? null : line("cursor", x(at), top, x(at), bottom), lines));
  drawSpread(place, x);
  listenToChart(steps, at, (batch) => { cursor = batch; drawLosses(status, losses, order); },
    (event) => first + ((event.clientX - $("chart").getBoundingClientRect().left - place.left) / (place.right - place.left)) * (last - first));
}
// A line for each sync, or a tick at the bottom where lines would be too close to each other.
function syncMarks({ syncs, changes, left, right }, x, top, bottom) {
  const seen = syncs.filter((sync) => x(sync.batch) >= left && x(sync.batch) <= right), isClose = seen.length * 5 > right - left;
  const every = Math.ceil((seen.length * 2) / (right - left)) || 1;
  return [seen.filter((_, i) => i % every === 0).map(({ batch }) => line("sync", x(batch), isClose ? bottom - 8 : top, x(batch), bottom)),
    changes.map((change) => [line("change", x(change.batch), top, x(change.batch), bottom),
      svg("text", { class: "changed", x: x(change.batch), y: top - 3, "text-anchor": "middle" }, `v${change.version}`)])];
}
// What a sync makes of the distance between the groups' losses: the rule's own numbers.
function drawSpread(place, x) {
  const { syncs, left, right, width } = place, [top, bottom] = [16, 76];
  const before = syncs.map((sync) => [sync.batch, sync.loss_spread_before ?? null]);
  const after = syncs.map((sync, i) => [syncs[i - 1]?.batch ?? sync.batch, sync.loss_spread_after ?? null]); // after the sync before
  const values = [...before, ...after].map(([, v]) => v).filter(isNumber);
  if (values.length < 4) return show($("spread"));
  const y = scaleOf(0, Math.max(...values) || 1, bottom, top), newest = (points) => points.slice(-Math.max(1, Math.ceil(points.length / 4)));
  const mean = (points) => { const own = newest(points).map(([, v]) => v).filter(isNumber); return own.length ? sum(own) / own.length : null; };
  const text = `Spread before a sync ${lossOf(mean(before))}, after it ${lossOf(mean(after))}`;
  show($("spread"), h("div", { class: "pairs" }, h("span", {}, dash("before"), "spread before a sync ", h("strong", {}, lossOf(mean(before)))),
    h("span", {}, dash("after"), "after it ", h("strong", {}, lossOf(mean(after)))), h("span", { class: "muted" }, `largest minus smallest loss, means of the last ${plural(newest(before).length, "sync")}`)),
  svg("svg", { viewBox: `0 0 ${width} 84`, height: 84, role: "img", "aria-label": `${text}, means of the last ${newest(before).length}.` },
    ticks(0, Math.max(...values), 2).map((v) => [line("grid", left, y(v), right, y(v)), svg("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, shortNumber(v))]),
    svg("path", { class: "curve before", d: pathOf(before, x, y) }), svg("path", { class: "curve after", d: pathOf(after.filter(([batch]) => batch >= place.first), x, y) })));
}
const dash = (look) => svg("svg", { class: "sample", viewBox: "0 0 26 8", "aria-hidden": "true" }, svg("line", { class: look, x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 2.5 }));
function listenToChart(steps, at, move, batchAt) {
  const all = [...new Set(steps)].sort((a, b) => a - b), chart = $("chart");
  chart.onpointermove = (event) => move(batchAt(event));
  chart.onpointerleave = chart.onblur = () => move(null);
  chart.onkeydown = (event) => {
    const here = at == null ? all.length : all.indexOf(at);
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: all.length - 1, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(to === null ? null : all[Math.min(all.length - 1, Math.max(0, to))]);
  };
}
