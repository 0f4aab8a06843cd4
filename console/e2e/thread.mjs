// What the main thread of a page does because new figures came, in processor time, from a trace of the browser.
//
// Invariant: everything counts that the thread does from the request for figures until a while after their answer, also what else
// falls into that time (such as a request for events). What it does at other times, figures have not caused.

/** So long after the answer its frame has been drawn, also on a busy host. */
const AFTER_MS = 200;
const CATEGORIES = ["devtools.timeline", "disabled-by-default-devtools.timeline"];
/** Parts of a task that are told, by the browser's name for them. */
const KINDS = ["FunctionCall", "Layout", "UpdateLayoutTree", "PrePaint", "Paint", "Commit", "MinorGC", "MajorGC"];

/** Traces a page for so long. */
async function trace(page, cdp, milliseconds) {
  const events = [];
  cdp.on("Tracing.dataCollected", ({ value }) => events.push(...value));
  const traceConfig = { includedCategories: CATEGORIES };
  await cdp.send("Tracing.start", { transferMode: "ReportEvents", traceConfig });
  await page.waitForTimeout(milliseconds);
  const isComplete = new Promise((done) => cdp.once("Tracing.tracingComplete", done));
  await cdp.send("Tracing.end");
  await isComplete;
  return events;
}

/**
 * The cost of each set of figures that came meanwhile, in milliseconds of processor time: `busy`, and its parts. `others`: what the
 * thread did meanwhile at other times.
 */
export async function costOfFigures(page, milliseconds) {
  const cdp = await page.context().newCDPSession(page);
  const events = await trace(page, cdp, milliseconds);
  await cdp.detach();
  const asked = events.filter(
    (e) => e.name === "ResourceSendRequest" && e.args.data.url.includes("/v1/figures"),
  );
  const answered = new Map(
    events.filter((e) => e.name === "ResourceFinish").map((e) => [e.args.data.requestId, e.ts]),
  );
  const end = Math.max(...events.map((e) => e.ts));
  const sets = asked.flatMap(({ pid, tid, ts, args }) => {
    const until = answered.get(args.data.requestId) + 1000 * AFTER_MS;
    return until <= end ? [{ pid, tid, from: ts, until }] : [];
  });
  const within = (e, { pid, tid, from, until }) =>
    e.pid === pid && e.tid === tid && e.ts + e.dur >= from && e.ts < until;
  const cost = (name, isCounted) =>
    events.filter((e) => e.name === name && isCounted(e)).reduce((sum, e) => sum + (e.tdur ?? 0), 0) / 1000;
  const isMain = (e) => e.pid === asked[0]?.pid && e.tid === asked[0]?.tid;
  return {
    sets: sets.map((set) => ({
      busy: cost("RunTask", (e) => within(e, set)),
      kinds: Object.fromEntries(KINDS.map((kind) => [kind, cost(kind, (e) => within(e, set))])),
    })),
    others: cost("RunTask", (e) => isMain(e) && !sets.some((set) => within(e, set))),
  };
}
