// ---- Values, any of which may be missing.
const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const list = (value) => (Array.isArray(value) ? value.filter((item) => item != null && typeof item === "object") : []);
const sum = (values) => values.reduce((total, value) => total + (isNumber(value) ? value : 0), 0);
const or = (value, format) => (isNumber(value) ? format(value) : NONE);
const number = (value, most = 0, least = 0) =>
  or(value, (v) => v.toLocaleString("en-US", { minimumFractionDigits: least, maximumFractionDigits: most }));
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const lossOf = (value) =>
  or(value, (v) => {
    const size = Math.abs(v);
    return size >= 1e6 || (size > 0 && size < 1e-3)
      ? v.toExponential(2)
      : size < 1
        ? String(+v.toPrecision(3))
        : number(v, 2, 2);
  });
const duration = (value) =>
  or(value, (s) => {
    if (s < 59.5) return `${number(Math.max(0, s), s < 1 ? 2 : s < 10 ? 1 : 0)} s`;
    const minutes = Math.round(s / 60),
      hours = Math.floor(minutes / 60);
    if (minutes < 60) return `${minutes} min`;
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${number(Math.floor(hours / 24))} d ${hours % 24} h`;
  });
const age = (value) => or(value, (s) => duration(Math.round(s)));
const plain = (value) => (value == null ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));
function localTime(seconds) {
  const at = new Date(seconds * 1000),
    isToday = at.toDateString() === new Date().toDateString();
  return (
    (isToday ? "" : `${at.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} `) +
    at.toLocaleTimeString("en-GB")
  );
}
