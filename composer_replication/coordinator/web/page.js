// ---- The whole page.
let status = null;
function draw() {
  if (!status) return;
  $("main").hidden = false;
  const losses = status.losses && typeof status.losses === "object" ? status.losses : {};
  const groups = list(status.replicas).map((group) => ({ ...group, replica_id: String(group.replica_id ?? "?") }));
  const order = [...new Set([...groups.map((group) => group.replica_id), ...Object.keys(losses)])].sort((a, b) =>
    a.localeCompare(b, "en", { numeric: true }),
  );
  groups.sort((a, b) => order.indexOf(a.replica_id) - order.indexOf(b.replica_id));
  drawHead(status, groups);
  drawReport(status);
  drawGroups(status, groups, order);
  drawLosses(status, losses, order);
  drawGoodput(status.goodput, order);
  drawOuterLoop(status, groups);
  drawTimeline(status, groups, order);
  drawEvents(status, groups);
  drawSettings(status, groups);
  drawData(list(status.datasets));
}
// The link to the report; in the report, the run's other files beside it.
function drawReport(status) {
  $("report").className = status.report ? "wide" : "";
  const files = status.report?.files,
    name = status.run_name ? `${plain(status.run_name)} · ` : "";
  if (!status.report)
    return show($("report"), h("button", { id: "save", type: "button" }, "Save this page as one file (report.html)"));
  const link = (file) => h("a", { href: file.split("/").map(encodeURIComponent).join("/") }, file);
  const own = files.filter((file) => !file.includes("/")),
    ofGroups = files.filter((file) => file.includes("/"));
  show(
    $("report"),
    h("span", { class: "muted" }, `${name}report of ${localTime(status.report.written)}`),
    own.map(link),
    ofGroups.length
      ? h("details", {}, h("summary", {}, "files of the groups"), h("div", { class: "pairs" }, ofGroups.map(link)))
      : null,
  );
}
async function saveReport() {
  // by a request of our own, since a link cannot carry the token
  const answer = await fetch("v1/report", { headers: authorization(), cache: "no-store" }).catch(() => null);
  if (!answer?.ok) {
    problem = "The report cannot be fetched.";
    return showProblem();
  }
  const address = URL.createObjectURL(await answer.blob());
  h("a", { href: address, download: "report.html" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// ---- Asking the service.
const EVERY_MS = 1000,
  TIMEOUT_MS = 5000,
  opened = Date.now();
let answered = null,
  problem = null,
  token = "",
  isAsking = false;
function readToken() {
  // not by URLSearchParams, which turns a "+" into a blank
  const [, encoded] = /[#&]token=([^&]*)/.exec(location.hash) || [];
  try {
    token = encoded ? decodeURIComponent(encoded) : sessionStorage.getItem("token") || "";
  } catch {
    token = encoded || "";
  }
  if (encoded) keepToken();
}
function keepToken() {
  // and remove it from the address bar, which appears in histories and screenshots
  try {
    sessionStorage.setItem("token", token);
  } catch {
    /* then it is lost at a reload */
  }
  history.replaceState(null, "", location.pathname + location.search);
}
function showProblem() {
  $("gone").hidden = !problem;
  if (!problem) return show($("gone"));
  const passed = duration(Math.round((Date.now() - (answered ?? opened)) / 1000));
  const since = answered
    ? `The last answer came ${passed} ago; what is shown is from then.`
    : `No answer since this page was opened ${passed} ago.`;
  // Screen readers read the problem once; without aria-hidden they would read the age every second.
  show($("gone"), `${problem} `, h("span", { "aria-hidden": "true" }, since), " Trying again every second.");
}
function askForToken() {
  problem = null;
  show($("why"), token ? "The service rejected this token." : "The service asks for the run's token.");
  if (!status) show($("state"), "The run is shown once you enter the token");
  if ($("ask").hidden) {
    $("ask").hidden = false;
    $("token").focus();
  }
}
function parse(text) {
  // Python writes NaN, which is not JSON
  try {
    return JSON.parse(text);
  } catch {
    return JSON.parse(text.replace(/([:,[]\s*)(?:NaN|-?Infinity)(?=\s*[,\]}])/g, "$1null"));
  }
}
function authorization() {
  return token ? { Authorization: `Bearer ${token}` } : {};
}
async function ask() {
  problem = await fetch("v1/page", {
    headers: authorization(),
    cache: "no-store",
    signal: AbortSignal.timeout(TIMEOUT_MS),
  })
    .then(
      async (answer) => {
        if (answer.status === 401) {
          isAsking = false;
          return askForToken();
        } // goes on with a new token
        if (!answer.ok) return `The service answers with an error (HTTP ${answer.status}).`;
        const text = await answer.text();
        try {
          status = Object(parse(text));
          draw();
        } catch (error) {
          console.error(error);
          return "The service's answer cannot be shown.";
        }
        answered = Date.now();
        $("ask").hidden = true;
      },
      () => "The service does not answer.",
    )
    .catch(() => "The service does not answer.");
  showProblem();
  if (isAsking) setTimeout(ask, EVERY_MS);
}
function start() {
  if (!isAsking) {
    isAsking = true;
    ask();
  }
}
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(token))
    return show($("why"), "A token has printable ASCII characters only, and no blanks.");
  $("token").value = "";
  keepToken();
  start();
});
$("report").addEventListener("click", (event) => {
  if (event.target.id === "save") saveReport();
});
$("range").addEventListener("change", draw);
new ResizeObserver(draw).observe($("lower"));
const embedded = $("embedded").textContent.trim();
if (embedded) {
  // a report: nobody is asked
  status = Object(parse(embedded));
  draw();
} else {
  addEventListener("hashchange", () => {
    readToken();
    start();
  });
  setInterval(showProblem, EVERY_MS);
  readToken();
  start();
}
