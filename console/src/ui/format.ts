// Figures as text. Agrees with `spillway top`: the same bytes, durations and percentages read the same in both.
//
// Never rounds up to a state that has not been reached: 99.96% is not shown as 100%.

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** Bytes as `512 B` or `4.0 GiB`. */
export function bytes(n: number): string {
  if (!Number.isFinite(n)) return "-";
  const whole = Math.floor(Math.max(0, n));
  if (whole < 1024) return `${whole} B`;
  const power = Math.min(UNITS.length, Math.floor(Math.log2(whole) / 10));
  return `${(whole / 1024 ** power).toFixed(1)} ${UNITS[power - 1]}`;
}

/** Bytes a second; "-" before there are two moments to compare. */
export function rate(n: number | null | undefined): string {
  return n == null ? "-" : `${bytes(n)}/s`;
}

/** A whole number with thin spaces between thousands. */
export function count(n: number): string {
  return Math.round(n)
    .toString()
    .replace(/\B(?=(\d{3})+(?!\d))/g, "\u2009");
}

/** A share from 0 to 1 as `45.2%`. */
export function percent(share: number, digits = 1): string {
  const scale = 10 ** digits;
  const value = Math.floor(share * 100 * scale + 1e-9) / scale;
  return `${value.toFixed(digits)}%`;
}

/** Seconds as `45 s`, `12 min`, `3 h 20 min` or `5 d`. */
export function duration(seconds: number): string {
  const s = Math.floor(seconds);
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  if (s < 172_800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86_400)} d`;
}

/** Time to full. Far forecasts change with every tick, so beyond a day only that is said. */
export function timeToFull(seconds: number | null): string {
  if (seconds == null) return "-";
  if (seconds > 86_400) return "> 1 d";
  return seconds <= 0 ? "full" : duration(seconds);
}

/** Nanoseconds as `850 ns`, `12.5 us`, `3.2 ms` or `1.4 s`. */
export function nanoseconds(ns: number): string {
  if (ns < 1000) return `${Math.round(ns)} ns`;
  if (ns < 1e6) return `${(ns / 1e3).toFixed(1)} us`;
  if (ns < 1e9) return `${(ns / 1e6).toFixed(1)} ms`;
  return `${(ns / 1e9).toFixed(1)} s`;
}

/** A size exactly, as options and files take it: `256M`; a plain number if it is no multiple of a unit. */
export function sizeText(n: number): string {
  for (const [power, unit] of [
    [4, "T"],
    [3, "G"],
    [2, "M"],
    [1, "K"],
  ] as const) {
    const one = 1024 ** power;
    if (n >= one && n % one === 0) return `${n / one}${unit}`;
  }
  return String(n);
}

/** Reads a size such as `256M` or `1 GiB`; an error is a sentence for people. */
export function parseSize(text: string): number | { error: string } {
  const match = text.trim().match(/^(\d+)\s*([a-z]*)$/i);
  if (!match) return { error: "A size is a whole number with K, M, G or T, such as 256M." };
  const unit = (match[2] ?? "").toUpperCase();
  const power = { "": 0, B: 0, K: 1, KIB: 1, M: 2, MIB: 2, G: 3, GIB: 3, T: 4, TIB: 4 }[unit];
  if (power === undefined) {
    return /^[KMGT]B$/.test(unit)
      ? { error: `'${unit}' may mean two sizes: write ${unit[0]}iB.` }
      : { error: "A size is a whole number with K, M, G or T, such as 256M." };
  }
  const n = Number(match[1]) * 1024 ** power;
  return n <= Number.MAX_SAFE_INTEGER ? n : { error: "The size is too large." };
}

/** Reads a whole number within bounds; an error is a sentence for people. */
export function parseWhole(text: string, least: number, most: number): number | { error: string } {
  if (!/^\d+$/.test(text.trim())) return { error: "It is a whole number." };
  const n = Number(text);
  if (n < least) return { error: `The least is ${least}.` };
  return n <= most ? n : { error: `The most is ${most}.` };
}

/** How long ago a time was, as `12 s ago`. */
export function ago(time: string, now: number): string {
  const seconds = Math.max(0, (now - Date.parse(time)) / 1000);
  return seconds < 1 ? "now" : `${duration(seconds)} ago`;
}

/** A time as `2026-11-28 12:31:14`, in the browser's time zone. */
export function clock(time: string | number): string {
  const d = new Date(time);
  if (Number.isNaN(d.getTime())) return "-";
  const two = (n: number) => String(n).padStart(2, "0");
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
}

/** A number with its noun: `1 machine`, `3 machines`. */
export function plural(n: number, one: string, many = `${one}s`): string {
  return `${count(n)} ${n === 1 ? one : many}`;
}
