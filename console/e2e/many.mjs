// Hundreds of machines that write, and two thousand that exist: what a console costs the daemon and the browser. The disks
// are real and are written to over NBD; there are no guests.
//
// SPILLWAY_DAEMON_PID  the daemon, whose processor time is read
// SPILLWAY_MACHINES    the folder that machines run in
// SPILLWAY_BUDGETS     "1": the programs are optimised, and the budgets hold as they are; otherwise several times as much is allowed
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { go, launch, median, open, say, spillway } from "./lib.mjs";
import { costOfFigures } from "./thread.mjs";

const { SPILLWAY_DAEMON_PID, SPILLWAY_MACHINES, SPILLWAY_BUDGETS } = process.env;
const MACHINES = 2000;
/** How long processor time is counted. */
const COUNT_MS = SPILLWAY_BUDGETS === "1" ? 20_000 : 10_000;
/** The same for what consoles cost: the daemon looks at each machine, and a page at the list of them, every 30 s. */
const SHARE_MS = SPILLWAY_BUDGETS === "1" ? 60_000 : 30_000;
/** Longest gap between two frames while a list scrolls. */
const FRAME_MS = 50;
/** Processor time of the daemon for consoles, in percent of a core. Much more than this would still be little. */
const DAEMON_PERCENT = { one: 0.4, ten: 0.5 };
/** Processor time of a page's main thread for a set of figures. */
const TICK_MS = 8;

const name = (i) => `many-${String(i).padStart(4, "0")}`;
const range = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => from + i);

/** Processor time of the daemon, in milliseconds (proc(5): of all its threads, in hundredths of a second). */
function spent() {
  const stat = readFileSync(`/proc/${SPILLWAY_DAEMON_PID}/stat`, "utf8");
  const fields = stat.slice(stat.lastIndexOf(")") + 2).split(" ");
  return 10 * (Number(fields[11]) + Number(fields[12]));
}

/** Share of a core that the daemon takes, in percent. */
async function share(page) {
  const [before, at] = [spent(), performance.now()];
  await page.waitForTimeout(SHARE_MS);
  return (100 * (spent() - before)) / (performance.now() - at);
}

/** Shows the machines. What is read once for that is over some seconds after rows have figures, however busy the host is. */
async function showMachines(page) {
  await go(page, "#/machines");
  await page.locator("tbody .figures").first().waitFor({ timeout: 60_000 });
  await page.waitForTimeout(5000);
}

/** Writes to the disks of machines until it is ended. */
async function traffic(numbers) {
  const sockets = numbers.map((i) => `${SPILLWAY_MACHINES}/${name(i)}/disk.nbd`);
  const script = new URL("traffic.py", import.meta.url).pathname;
  // Debian's own: libnbd is a package of it.
  const child = spawn("/usr/bin/python3", [script, ...sockets], { stdio: ["ignore", "pipe", "inherit"] });
  try {
    // A line may come in two pieces.
    const [line] = await once(createInterface({ input: child.stdout }), "line");
    assert.equal(line, "writing");
  } catch (error) {
    child.kill();
    throw error;
  }
  return child;
}

async function start(from, to) {
  spillway("machine", "start", ...range(from, to).map(name), "--wait");
}

/**
 * How many times as much is allowed where programs are not optimised, and the host may be any. A page's own code is the same there,
 * but hosts of the same kind were seen to need 2.5 times as long for it; the time between two frames is that of everything on the host.
 */
const ROOM = SPILLWAY_BUDGETS === "1" ? { daemon: 1, page: 1, frame: 1 } : { daemon: 6, page: 4, frame: 4 };

/** What is over its budget. */
const over = [];
function budget(used, most, text) {
  if (used <= most) return;
  over.push(text);
  say(`over its budget: ${text}: ${used.toFixed(2)} of ${most.toFixed(2)}`);
}

/** What sets of figures cost a page. */
async function setsOfFigures(page) {
  const { sets, others } = await costOfFigures(page, COUNT_MS);
  assert.ok(sets.length >= 3, `${sets.length} sets of figures`);
  assert.ok(
    sets.every((set) => set.busy > 0),
    "the browser says what its main thread did",
  );
  const busy = median(sets.map((set) => set.busy));
  const ms = (n) => `${n.toFixed(1)} ms`;
  say(`${sets.length} sets of figures, each ${ms(busy)} of the main thread (median)`);
  for (const kind of Object.keys(sets[0].kinds))
    say(`  ${kind} ${ms(median(sets.map((set) => set.kinds[kind])))}`);
  say(`what the main thread does at other times: ${ms(others / sets.length)} for each set`);
  budget(busy, TICK_MS * ROOM.page, "ms of the main thread for a set of figures");
}

const browser = await launch({ isWhole: true });
let writer;
try {
  await start(1, 200);
  writer = await traffic(range(1, 200));
  const { context, page } = await open(browser);
  await page.waitForTimeout(3000);

  say("what consoles cost the daemon, with 200 machines");
  const none = await share(page);
  await showMachines(page);
  // What ten take is little more than one may take: where much more is allowed, they tell of one, too.
  const one = SPILLWAY_BUDGETS === "1" ? await share(page) : undefined;
  const others = await Promise.all(Array.from({ length: 9 }, () => open(browser)));
  await Promise.all(others.map((other) => showMachines(other.page)));
  const ten = await share(page);
  for (const { context } of others) await context.close();
  const percent = (n) => `${n.toFixed(2)}%`;
  say(`daemon: ${percent(none)} of a core without a console, ${percent(ten)} with ten`);
  if (one !== undefined) {
    say(`daemon: ${percent(one)} with one`);
    budget(one - none, DAEMON_PERCENT.one * ROOM.daemon, "percent of a core that one console takes");
  }
  budget(ten - none, DAEMON_PERCENT.ten * ROOM.daemon, "percent of a core that ten consoles take");

  say("500 machines that write");
  writer.kill();
  spillway("catalog", "scale", "many", "500");
  // No event tells of machines that are made: the figures do.
  await go(page, "#/machines");
  await page.getByText(/^500 machines$/).waitFor({ timeout: 10_000 });
  await start(201, 500);
  writer = await traffic(range(1, 500));
  await go(page, "#/machines?sort=-fill");
  await page.waitForTimeout(4000);
  await setsOfFigures(page);

  say("two thousand machines, 500 of them write");
  spillway("catalog", "scale", "many", String(MACHINES));
  await page.getByText(/^2.000 machines$/).waitFor({ timeout: 10_000 });
  await page.waitForTimeout(4000);
  await setsOfFigures(page);
  say("the list scrolls");
  assert.ok((await page.locator("tbody tr").count()) < 80, "only rows that can be seen exist");
  const list = page.getByRole("region", { name: "Machines" });
  const gaps = await list.evaluate(async (element) => {
    const gaps = [];
    let last = performance.now();
    for (let i = 0; i < 120; i++) {
      element.scrollTop += 180;
      await new Promise(requestAnimationFrame);
      const now = performance.now();
      gaps.push(now - last);
      last = now;
    }
    return gaps;
  });
  say(`frames: median ${median(gaps).toFixed(0)} ms, longest ${Math.max(...gaps).toFixed(0)} ms`);
  budget(Math.max(...gaps), FRAME_MS * ROOM.frame, "ms between two frames");
  say("a row that has the focus keeps it, and its place");
  await list.evaluate((element) => element.scrollTo(0, 0));
  await page.locator("tbody tr[aria-rowindex='2']").waitFor();
  await page.locator("tbody tr th a").nth(3).focus();
  const active = () =>
    page.evaluate(() => {
      const { textContent: name, parentElement } = document.activeElement;
      return [name, parentElement.closest("tr")?.getAttribute("aria-rowindex")];
    });
  const [focused, place] = await active();
  assert.match(focused, /^many-/);
  // Two sets of figures come meanwhile, by which the list is sorted.
  await page.waitForTimeout(5000);
  assert.deepEqual(await active(), [focused, place]);
  for (const top of [20_000, 60_000, 0]) {
    await list.evaluate((element, top) => element.scrollTo(0, top), top);
    await page.waitForTimeout(200);
    assert.deepEqual(await active(), [focused, place], `scrolled to ${top}`);
  }
  await list.focus();
  await page.keyboard.press("End");
  await page.waitForFunction(
    (rows) => document.querySelector(`tr[aria-rowindex='${rows}']`) !== null,
    MACHINES + 1,
  );
  await context.close();
  assert.deepEqual(over, []);
  say("done");
} finally {
  writer?.kill();
  await browser.close();
}
