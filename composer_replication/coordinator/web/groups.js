// ---- A colour and a dash for each group: no two of 32 have both in common.
const DASHES = [null, "7 3", "2 3", "9 3 2 3"];
const stroke = (i) => ({ style: `stroke: var(--s${i % 8})`, "stroke-dasharray": DASHES[(i + Math.floor(i / 8)) % 4] });
const sample = (i) =>
  svg(
    "svg",
    { class: "sample", viewBox: "0 0 26 8", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 2.5, ...stroke(i) }),
  );
const nameOf = (id) => h("span", { class: "name", title: id }, id);

// ---- The run in one line.
function drawHead(status, groups) {
  const alive = groups.filter((group) => group.is_alive),
    expected = status.num_replicas,
    fewest = status.min_replicas;
  const ended = groups.filter(hasEnded).length,
    dead = groups.length - alive.length - ended;
  const areAll = (phase) => alive.every((group) => group.phase === phase);
  const [state, look] = !groups.length
    ? ["Waiting for replica groups", ""]
    : ended === groups.length
      ? ["Finished", "good"]
      : !alive.length
        ? ["No replica group alive", "bad"]
        : alive.length < fewest
          ? [`Too few replica groups: a sync needs ${number(fewest)}`, "bad"]
          : areAll("joining")
            ? ["Joining", ""]
            : areAll("evaluating")
              ? ["Evaluating", ""]
              : ["Training", ""];
  const step = number(
    isNumber(status.outer_step) ? status.outer_step : Math.max(...groups.map((g) => g.outer_step).filter(isNumber)),
  );
  const of = status.report
    ? plural(groups.length, "group")
    : isNumber(expected)
      ? `${alive.length} of ${number(expected)} groups alive`
      : `${plural(alive.length, "group")} alive`;
  show($("state"), h("span", { class: look }, state));
  show(
    $("facts"),
    "Outer step ",
    h("strong", {}, step),
    ` · ${of}`,
    ended ? `, ${ended} finished` : null,
    dead ? [", ", h("span", { class: "bad" }, `${dead} dead`)] : null,
  );
  document.title = `${state} · outer step ${step} · ${of}`;

  // Only live groups count: a dead one loads the others' state when it is restarted.
  const reporting = (alive.length ? alive : groups).filter((g) => isNumber(g.batch) && g.max_batches > 0);
  const part = (group) => group.batch / group.max_batches;
  const speed = (group) => (group.steps_per_second > 0 ? group.steps_per_second : 0);
  const slowest = reporting.sort((a, b) => part(a) - part(b) || speed(a) - speed(b))[0];
  if (!slowest) return show($("bar"));
  const percent = Math.min(100, 100 * part(slowest)),
    left = slowest.max_batches - slowest.batch;
  const text = `${number(slowest.batch)} of ${number(slowest.max_batches)} batches`;
  show(
    $("bar"),
    h(
      "div",
      {
        class: "track",
        role: "progressbar",
        "aria-label": "Batches of the slowest group",
        "aria-valuemin": 0,
        "aria-valuemax": 100,
        "aria-valuenow": Math.floor(percent),
        "aria-valuetext": text,
      },
      h("div", { style: `width: ${percent}%` }),
    ),
    h(
      "span",
      { title: `The slowest group is ${slowest.replica_id}` },
      h("strong", {}, `${Math.floor(percent)} %`),
      ` · ${text}`,
      alive.length && left > 0 && speed(slowest) ? ` · about ${duration(left / speed(slowest))} left` : null,
    ),
  );
}

// ---- Replica groups.
function hostOf(g) {
  const ranks = isNumber(g.world_size) ? plural(g.world_size, "rank") : null,
    starts = g.registrations > 1 ? `${number(g.registrations)} starts` : null;
  const more = [ranks, starts].filter(Boolean).join(", ");
  return g.host == null
    ? more || NONE
    : [nameOf(plain(g.host)), h("span", { class: "muted" }, more ? ` ${more}` : null)];
}
const hasEnded = (group) => group.phase === "finished" && !group.is_alive;
function drawGroups(status, groups, order) {
  const cell = (label, children, look = "number") =>
    h("td", { role: "cell", "data-label": label, class: look }, children);
  const heads = [
    "Group",
    "State",
    "Phase",
    "Round",
    "Batch",
    "Loss",
    "Contribution",
    "Participants",
    "Speed",
    "Last sync",
    "Host",
  ];
  const isTimed = status.settings?.round_seconds != null; // then each group's rounds have a length of their own
  const rows = groups.map((g) => {
    const [word, look] = g.is_alive ? ["● alive", "good"] : hasEnded(g) ? ["✓ ended", "muted"] : ["✕ dead", "bad"];
    const silent =
      g.is_alive || status.report
        ? null
        : !isNumber(g.last_seen_s)
          ? " since before this service"
          : hasEnded(g)
            ? ` ${age(g.last_seen_s)} ago`
            : ` for ${age(g.last_seen_s)}`;
    const isOutdated = isNumber(g.settings_version) && g.settings_version < status.settings_version;
    // A heartbeat says how long ago the last sync was at that time.
    const since = isNumber(g.seconds_since_sync) ? `${age(g.seconds_since_sync + sum([g.last_seen_s]))} ago` : null;
    const blocked = isNumber(g.sync_seconds) ? `took ${duration(g.sync_seconds)}` : null;
    return h(
      "tr",
      { role: "row" },
      h("th", { scope: "row", role: "rowheader" }, sample(order.indexOf(g.replica_id)), nameOf(g.replica_id)),
      cell(
        null,
        [
          h("span", { class: look, title: `last seen ${age(g.last_seen_s)} ago` }, word),
          h("span", { class: "muted" }, silent),
        ],
        null,
      ),
      cell(
        "Phase",
        [
          nameOf(g.phase == null ? NONE : g.is_alive || hasEnded(g) ? plain(g.phase) : `was ${plain(g.phase)}`),
          isOutdated ? h("span", { class: "warn" }, ` settings v${g.settings_version}`) : null,
        ],
        null,
      ),
      cell("Round", number(g.round, 1, 1) + (isTimed && isNumber(g.sync_every) ? ` of ${number(g.sync_every)} steps` : "")),
      cell(
        "Batch",
        number(g.batch) + (isNumber(g.batch) && isNumber(g.max_batches) ? ` of ${number(g.max_batches)}` : ""),
      ),
      cell("Loss", lossOf(g.loss)),
      cell("Contribution", number(g.contribution, 2)),
      cell("Participants", number(g.num_participants)),
      cell("Speed", g.is_alive && isNumber(g.steps_per_second) ? `${number(g.steps_per_second, 1, 1)} steps/s` : NONE),
      cell("Last sync", [since, blocked].filter(Boolean).join(", ") || NONE, "number wide"),
      cell("Host", hostOf(g), "wide"),
    );
  });
  const none = h(
    "td",
    { role: "cell", colspan: heads.length, class: "muted wide" },
    "No replica group has registered yet.",
  );
  if (!rows.length) rows.push(h("tr", { role: "row" }, none));
  const isLeft = (head) => ["Group", "State", "Phase", "Host"].includes(head);
  const head = heads.map((text) =>
    h("th", { scope: "col", role: "columnheader", class: isLeft(text) ? null : "number" }, text),
  );
  show(
    $("groups"),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    h("tbody", { role: "rowgroup" }, rows),
  );
}
