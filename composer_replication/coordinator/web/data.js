// ---- Samples.
const KINDS = ["done", "leased", "available"];
function drawEpoch(epoch) {
  const all = Math.max(epoch.length || 0, sum(KINDS.map((kind) => epoch[kind]))) || 1;
  const labels = KINDS.map((kind) => `${number(epoch[kind])} ${kind}`);
  return h(
    "div",
    { class: "epoch" },
    h(
      "div",
      { class: "pairs" },
      h("strong", {}, `Epoch ${number(epoch.epoch)}`),
      or(epoch.done, (done) => `${Math.floor((100 * done) / all)} % done`),
    ),
    h(
      "div",
      { class: "track", role: "img", "aria-label": labels.join(", ") },
      KINDS.map((kind, i) =>
        h("span", { class: kind, title: labels[i], style: `width: ${(100 * sum([epoch[kind]])) / all}%` }),
      ),
    ),
    h(
      "div",
      { class: "pairs muted" },
      KINDS.map((kind, i) =>
        h(
          "span",
          {},
          h("span", { class: "key track", "aria-hidden": "true" }, h("span", { class: kind, style: "width: 100%" })),
          labels[i],
        ),
      ),
    ),
  );
}
function drawData(datasets) {
  $("data").hidden = !datasets.length;
  show(
    $("data"),
    datasets.map((dataset, i) => {
      const epochs = list(dataset.epochs),
        isDone = (epoch) => epoch.done >= (epoch.length ?? dataset.length);
      const shown = epochs.filter((epoch, i) => !isDone(epoch) || i >= epochs.length - 2).slice(-6),
        rest = epochs.length - shown.length;
      return [
        h(
          "h2",
          { class: i ? "later" : null },
          `Data ${dataset.dataset_id ?? ""} `,
          h(
            "span",
            {},
            isNumber(dataset.length) ? `· ${plural(dataset.length, "sample")} ` : null,
            isNumber(dataset.unit_size) ? `· leased in units of ${number(dataset.unit_size)}` : null,
          ),
        ),
        epochs.length ? null : h("p", { class: "muted" }, "No epoch has begun."),
        rest ? h("p", { class: "muted" }, `${plural(rest, "earlier epoch")} not shown`) : null,
        shown.map(drawEpoch),
        dataset.trained_in_part > 0
          ? h("p", { class: "muted later" }, `${plural(dataset.trained_in_part, "sample")} trained again in part`)
          : null,
        dataset.trained_twice > 0
          ? h("p", { class: "muted later" }, `${plural(dataset.trained_twice, "sample")} trained twice`)
          : null,
      ];
    }),
  );
}

// ---- Goodput: where the time of the groups goes.
const PARTS = {
  training: "training",
  syncs: "syncs",
  waiting: "waiting",
  starting: "starting",
  thrown_away: "thrown away",
  dead: "dead",
  other: "other",
};
const percent = (part) => or(part, (v) => `${number(100 * v, 1, 1)} %`);
function drawParts(seconds, look, label) {
  const total = sum(Object.values(seconds).map((s) => Math.max(0, s))) || 1,
    text = Object.keys(PARTS)
      .filter((part) => seconds[part] > 0)
      .map((part) => `${PARTS[part]} ${percent(seconds[part] / total)}`)
      .join(", ");
  return h(
    "div",
    { class: `track ${look}`, role: "img", "aria-label": `${label}: ${text}`, title: text },
    Object.keys(PARTS).map((part) =>
      h("span", { class: part, style: `width: ${(100 * Math.max(0, sum([seconds[part]]))) / total}%` }),
    ),
  );
}
function drawGoodput(goodput, order) {
  const is = goodput && isNumber(goodput.goodput) && goodput.seconds;
  $("goodput").hidden = !is;
  if (!is) return;
  const total = sum(Object.values(goodput.seconds).map((s) => Math.max(0, s))) || 1,
    groups = Object(goodput.groups);
  const names = order.filter((id) => groups[id]),
    outside = goodput.goodput_outside_faults;
  show(
    $("goodput"),
    h("h2", { id: "h-goodput" }, "Goodput ", h("span", {}, "· where the groups' time goes")),
    h(
      "p",
      {},
      h("span", { class: "big" }, percent(goodput.goodput)),
      h(
        "span",
        { class: "muted" },
        "of what undisturbed training would have put into the model",
        goodput.seconds.dead > 0.005 * total ? `; ${percent(outside)} of the time that faults left` : null,
      ),
    ),
    drawParts(goodput.seconds, "parts", "All groups"),
    h(
      "ul",
      { class: "legend" },
      Object.keys(PARTS)
        .filter((part) => goodput.seconds[part] > 0.0005 * total)
        .map((part) =>
          h(
            "li",
            {},
            h("span", { class: `key ${part}`, "aria-hidden": "true" }),
            PARTS[part],
            h("strong", {}, percent(goodput.seconds[part] / total)),
          ),
        ),
    ),
    names.length > 1 && names.length <= 16
      ? h(
          "ul",
          { class: "bars", "aria-label": "Goodput of each group" },
          names.map((id) =>
            h(
              "li",
              {},
              h("span", { class: "name", title: `group ${id}` }, `group ${id}`),
              drawParts(groups[id].seconds, "", `Group ${id}`),
              h("span", { class: "value" }, percent(groups[id].goodput)),
            ),
          ),
        )
      : null,
  );
}
