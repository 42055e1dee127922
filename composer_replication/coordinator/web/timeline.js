// ---- Faults and joins on a time line.
const STEPS_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
const livesOf = (status, groups) =>
  Object.fromEntries(
    Object.entries(Object(status.lives)).map(([id, lives]) => {
      const group = groups.find((g) => g.replica_id === id),
        seen = status.time - sum([group?.last_seen_s]);
      return [
        id,
        list(lives)
          .filter((life) => isNumber(life.began))
          .map((life) =>
            isNumber(life.ended)
              ? life
              : {
                  ...life,
                  ended: status.report ? Math.max(life.began, sum([group?.trained_at])) : seen,
                  end: group && !group.is_alive ? (hasEnded(group) ? "finished" : "lost") : null,
                },
          ),
      ];
    }),
  );
const sinceBegin = (s, step) =>
  step >= 60 || s < 60 ? duration(s) : `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`;
function drawTimeline(status, groups, order) {
  const lives = livesOf(status, groups),
    ids = order.filter((id) => lives[id]?.length),
    all = ids.flatMap((id) => lives[id]);
  if (!all.length) return show($("timeline"), h("p", { class: "muted" }, "No replica group has joined yet."));
  const marks = list(status.marks).filter((mark) => isNumber(mark.time));
  const begin = Math.min(...all.map((life) => life.began)),
    end = Math.max(begin + 1, ...all.map((life) => life.ended), ...marks.map((mark) => mark.time));
  const width = Math.max(240, $("timeline").clientWidth),
    left = width < 500 ? 64 : 96,
    right = width - 16,
    row = 26,
    bottom = ids.length * row + 6;
  const x = scaleOf(begin, end, left, right),
    step = STEPS_S.find((s) => (end - begin) / s <= width / 90) || 2419200;
  const counts = {
    joins: all.length,
    lost: all.filter((life) => life.end === "lost").length,
    faults: marks.filter((mark) => mark.kind === "fault").length,
  };
  const words = [
    plural(counts.joins, "join"),
    counts.lost ? `${counts.lost} lost` : null,
    counts.faults ? plural(counts.faults, "injected fault") : null,
  ]
    .filter(Boolean)
    .join(", ");
  const titled = (tag, attributes, text) => svg(tag, attributes, svg("title", {}, text));
  const lane = (id, k) => {
    const y = k * row + 8,
      i = order.indexOf(id),
      own = marks.filter((mark) => mark.replica_id === id || (mark.replica_id == null && mark.kind === "fault"));
    const cut = id.length > left / 8 ? `${id.slice(0, Math.floor(left / 8) - 1)}…` : id;
    return [
      svg("text", { x: left - 8, y: y + 10, "text-anchor": "end" }, cut, svg("title", {}, `group ${id}`)),
      svg("rect", { class: "lane", x: left, y, width: right - left, height: 12, rx: 3 }),
      lives[id].map((life) => lifeOf(life, x, y, i, id, titled)),
      own.map((mark) => markOf(mark, x, y, titled)),
    ];
  };
  const changes = list(status.settings_changes)
    .map((change) => ({
      ...change,
      time: list(status.syncs).find((sync) => sync.outer_step >= change.outer_step)?.time,
    }))
    .filter((change) => isNumber(change.outer_step) && isNumber(change.time));
  show(
    $("timeline"),
    svg(
      "svg",
      {
        viewBox: `0 0 ${width} ${bottom + 24}`,
        height: bottom + 24,
        role: "img",
        "aria-label": `Time line of ${plural(ids.length, "group")}: ${words}. The events below say when.`,
      },
      Array.from({ length: Math.floor((end - begin) / step) + 1 }, (_, i) => begin + i * step).map((at) => [
        line("grid", x(at), 0, x(at), bottom),
        svg(
          "text",
          { x: x(at), y: bottom + 16, "text-anchor": at === begin ? "start" : "middle" },
          at === begin ? localTime(at) : `+${sinceBegin(at - begin, step)}`,
        ),
      ]),
      ids.map(lane),
      changes.map((change) =>
        titled(
          "line",
          { class: "change", x1: x(change.time), x2: x(change.time), y1: 0, y2: bottom },
          `settings version ${change.version}`,
        ),
      ),
    ),
    h(
      "ul",
      { class: "pairs how", "aria-hidden": "true" },
      [
        ["○", "joined"],
        ["✕", "lost"],
        ["▼", "fault"],
        ["●", "retry, late join or lost steps", "warn"],
      ].map(([sign, what, look]) =>
        h("li", {}, h("span", { class: look || (sign === "○" ? null : "bad") }, sign), ` ${what}`),
      ),
      h("li", {}, words),
    ),
  );
}
function lifeOf(life, x, y, i, id, titled) {
  const joined = isNumber(life.joined) ? Math.min(life.joined, life.ended) : life.began,
    colour = `fill: var(--s${i % 8})`,
    a = x(life.ended);
  const bar = (from, to, opacity, text) =>
    titled(
      "rect",
      {
        x: x(from),
        y,
        width: Math.max(1, x(to) - x(from)),
        height: 12,
        rx: 3,
        style: `${colour}; opacity: ${opacity}`,
      },
      `group ${id}: ${text}`,
    );
  return [
    joined > life.began ? bar(life.began, joined, 0.35, `starting at ${localTime(life.began)}`) : null,
    bar(
      joined,
      Math.max(joined, life.ended),
      0.85,
      `${localTime(joined)} to ${life.end ? localTime(life.ended) : "now"}${life.end ? `, ${life.end}` : ""}`,
    ),
    titled(
      "circle",
      { class: "joined", cx: x(joined), cy: y + 6, r: 4, style: `stroke: var(--s${i % 8})` },
      `group ${id} joined at ${localTime(joined)}`,
    ),
    life.end === "lost"
      ? titled(
          "path",
          { class: "lost", d: `M${a - 4} ${y + 2}l8 8m0 -8l-8 8` },
          `group ${id} was lost at ${localTime(life.ended)}`,
        )
      : null,
  ];
}
function markOf(mark, x, y, titled) {
  const text = `${localTime(mark.time)}: ${plain(mark.text)}`,
    at = x(mark.time);
  if (mark.kind !== "fault") return titled("circle", { class: "trouble", cx: at, cy: y + 6, r: 3 }, text);
  return [
    isNumber(mark.until)
      ? titled("rect", { class: "span", x: at, y: y - 3, width: Math.max(2, x(mark.until) - at), height: 18 }, text)
      : null,
    titled("path", { class: "fault", d: `M${at - 4} ${y - 6}h8l-4 7z` }, text),
  ];
}

// ---- Events: the coordinator's, and what the groups' files say. Oldest first in the answer.
function drawEvents(status, groups) {
  const when = ({ time }) =>
    isNumber(time) && Math.abs(time) < 8e12
      ? h("time", { datetime: new Date(time * 1000).toISOString() }, localTime(time))
      : h("time", {}, NONE);
  const ofMark = (mark) => ({
    time: mark.time,
    text: mark.replica_id == null ? plain(mark.text) : `replica group ${mark.replica_id}: ${plain(mark.text)}`,
  });
  const lost = Object.entries(livesOf(status, groups)).flatMap(([id, lives]) =>
    lives
      .filter((life) => life.end === "lost")
      .map((life) => ({ time: life.ended, text: `replica group ${id} was lost` })),
  );
  const events = [...list(status.events), ...list(status.marks).map(ofMark), ...lost];
  const newest = events
    .reverse()
    .sort((a, b) => (b.time || 0) - (a.time || 0))
    .slice(0, 200);
  show(
    $("events"),
    newest.map((event) => h("li", {}, when(event), h("span", {}, plain(event.text)))),
    newest.length ? null : h("li", { class: "muted" }, "Nothing has happened yet."),
  );
}
