// ---- Settings, and the form that changes those that may change in mid-run.
const FIELDS = {
  outer_lr: ["number", "of the outer step", { step: "any", min: 0 }],
  outer_momentum: ["number", "0 to below 1", { step: "any", min: 0, max: 1 }],
  sync_every: ["number", "inner steps a round", { step: 1, min: 1 }],
  outer_schedule: ["text", "rows of [step, lr, momentum], or empty", { spellcheck: "false" }],
};
const textOf = (value) => (value == null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));
let awaited = null; // the version of this page's own change, until groups have it
function drawForm(status) {
  const names = status.report ? [] : Object.keys(FIELDS).filter((name) => (status.changeable || []).includes(name));
  $("change").hidden = !names.length;
  // Here an attribute is a field's default: what a person has typed stays while the run goes on.
  show(
    $("change"),
    names.map((name) => {
      const [type, hint, more] = FIELDS[name];
      return h(
        "div",
        {},
        h("label", { for: `to-${name}` }, name),
        h("input", {
          id: `to-${name}`,
          name,
          type,
          "aria-describedby": `hint-${name}`,
          autocomplete: "off",
          value: textOf(status.settings?.[name]),
          ...more,
        }),
        h("small", { id: `hint-${name}`, class: "how" }, hint),
      );
    }),
    h("button", { class: "main wide" }, "Change for all groups"),
  );
}
function valueOf(name, text) {
  // as the service wants it
  if (name === "outer_schedule") {
    try {
      return text.trim() ? JSON.parse(text) : [];
    } catch {
      throw new Error(`outer_schedule is not a list of rows: ${text}`);
    }
  }
  if (text.trim() === "" || Number.isNaN(Number(text))) throw new Error(`${name} needs a number`);
  return Number(text);
}
function say(text, hasFailed = false) {
  $("changed").className = hasFailed ? "failed" : "";
  show($("changed"), text);
}
async function change(event) {
  event.preventDefault();
  const inputs = [...$("change").querySelectorAll("input")].filter((input) => input.value !== input.defaultValue);
  if (!inputs.length) return say("Nothing to change: give a setting another value first.");
  try {
    const body = JSON.stringify(
      Object.fromEntries(inputs.map((input) => [input.name, valueOf(input.name, input.value)])),
    );
    const answer = await fetch("v1/settings", {
      method: "PATCH",
      headers: { ...authorization(), "Content-Type": "application/json" },
      body,
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    const reply = await answer.json();
    if (!answer.ok) throw new Error(reply.detail ?? `the service answers with an error (HTTP ${answer.status})`);
    awaited = reply.settings_version;
    $("change").reset();
    say(`Version ${awaited} is set. All groups adopt it at the same sync; its outer step will stand here.`);
    start();
  } catch (error) {
    say(
      `Nothing has changed: ${error.name === "TypeError" ? "the service does not answer" : error.message}.`.replace(
        /\.\.$/,
        ".",
      ),
      true,
    );
  }
}
function drawChanges(status, groups) {
  const changes = list(status.settings_changes),
    own = changes.find((one) => one.version === awaited && isNumber(one.outer_step));
  const all = groups.filter((group) => group.is_alive).every((group) => group.settings_version >= awaited);
  if (own && all) {
    say(`Version ${own.version} is in force in all groups since outer step ${number(own.outer_step)}.`);
    awaited = null;
  }
  const text = (one) =>
    String(one.source ?? "")
      .split("; ")
      .slice(1)
      .join("; ") || plain(one.source);
  show(
    $("changes"),
    changes.length
      ? [
          h("h3", {}, "Changes"),
          h(
            "ul",
            {},
            [...changes]
              .reverse()
              .slice(0, 20)
              .map((one) =>
                h(
                  "li",
                  {},
                  h("strong", {}, `v${one.version}`),
                  ` ${text(one)} `,
                  h(
                    "span",
                    { class: "muted" },
                    isNumber(one.outer_step)
                      ? `since outer step ${number(one.outer_step)}`
                      : status.report
                        ? "not adopted"
                        : "no group has reported it yet",
                  ),
                ),
              ),
          ),
        ]
      : null,
  );
}
function drawSettings(status, groups) {
  show(
    $("h-settings"),
    "Settings ",
    h(
      "span",
      {},
      isNumber(status.settings_version) ? `· version ${status.settings_version} ` : null,
      status.settings_source ? `· ${plain(status.settings_source).split("; ")[0]}` : null,
    ),
  );
  drawForm(status);
  drawChanges(status, groups);
  if (status.report) $("all-settings").open = true;
  const rows = Object.entries(status.settings || {}).map(([name, value]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row", class: "muted" }, name),
      h("td", { class: "number" }, Array.isArray(value) ? value.join(", ") : plain(value)),
    ),
  );
  show($("settings"), h("tbody", {}, rows.length ? rows : h("tr", {}, h("td", { class: "muted" }, "None reported."))));
  show(
    $("foot"),
    [
      `composer-replication ${status.version ?? ""}`,
      status.lighthouse_addr ? `lighthouse ${plain(status.lighthouse_addr)}` : null,
      isNumber(status.heartbeat_timeout_s)
        ? `a group is dead after ${duration(status.heartbeat_timeout_s)} of silence`
        : null,
      isNumber(status.min_replicas) ? `a sync needs ${plural(status.min_replicas, "group")}` : null,
    ]
      .filter(Boolean)
      .join(" · "),
  );
}
$("change").addEventListener("submit", change);
