// ---- How the outer loop does.
const READINGS = [
  [
    "Mean and momentum",
    ["momentum_cosine"],
    "Well above 0 the outer steps are steady; about 0 or below they overshoot: lower outer_lr.",
  ],
  [
    "Between groups",
    ["group_cosine"],
    "It falls as groups learn. Near 1 for long: lower outer_lr. Below 0: compare their data.",
  ],
  [
    "Mean / group norm",
    ["mean_norm_ratio"],
    "1 if the groups move alike, 1 / sqrt(k) if k groups move at right angles.",
  ],
  [
    "Loss after, before",
    ["loss_after", "loss_before"],
    "Syncs should not raise the loss more than the inner steps lower it: else lower outer_lr.",
  ],
  [
    "Spread after, before",
    ["loss_spread_after", "loss_spread_before"],
    "A group that stays apart after the syncs has other data or a fault.",
  ],
];
function drawOuterLoop(status, groups) {
  // all groups of a sync have the same numbers
  const has = (group) => READINGS.some(([, names]) => names.some((name) => isNumber(group[name])));
  const newest = groups
    .filter(has)
    .sort((a, b) => b.is_alive - a.is_alive || sum([b.outer_step]) - sum([a.outer_step]))[0];
  $("outer").hidden = !newest;
  if (!newest) return;
  show($("h-outer"), "Outer loop ", h("span", {}, `· outer step ${number(newest.outer_step)}`));
  const syncs = syncsOf(status),
    curve = (name) => syncs.map((sync) => [sync.outer_step, sync[name] ?? null]);
  const shown = READINGS.filter(([, names]) => names.some((name) => isNumber(newest[name])));
  show(
    $("readings"),
    h(
      "tbody",
      {},
      shown.map(([title, names, sentence]) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, title),
          h("td", { class: "line" }, sparkline(names.map(curve))),
          h("td", { class: "number" }, names.map((name) => number(newest[name], 2, 2)).join(", ")),
          h("td", { class: "how" }, sentence),
        ),
      ),
    ),
  );
}
