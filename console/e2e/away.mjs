// The daemon is killed and comes back, while eight tabs look at it: each goes on without being loaded again, and none has missed
// an event. By `spillway console`, or over TLS, where somebody has to sign in again, in one of the tabs.
//
// SPILLWAY_CONSOLE_TOKEN     over TLS: the token
import assert from "node:assert/strict";
import { ask, go, launch, lines, open, say, settled, spillway, tellFailure } from "./lib.mjs";

const TABS = 8;
const token = process.env.SPILLWAY_CONSOLE_TOKEN;
/** From an event to its line on the screen. */
const EVENT_MS = 1000;
/** Age of the figures on the screen. */
const FIGURES_MS = 2500;

const browser = await launch();
/** Lets a tab note when each event comes on its screen. An event is known by its time. */
const watch = (page) =>
  page.evaluate(() => {
    globalThis.notLoadedAgain = true;
    globalThis.came = {};
    const look = () => {
      for (const { dateTime } of document.querySelectorAll("ol.events time"))
        globalThis.came[dateTime] ??= Date.now();
    };
    look();
    new MutationObserver(look).observe(document.querySelector("main"), { childList: true, subtree: true });
  });
/** All events of the daemon, newest first. */
const events = () => lines("event", "--last", "4096").reverse();

/** Makes events; gives the time of the first. */
function happen() {
  const before = new Set(events().map((event) => event.id));
  spillway("machine", "reset", "desk-001", "--wait");
  return events().findLast((event) => !before.has(event.id)).time;
}

/** How long after it happened an event was on each screen, in milliseconds. */
async function arrivals(tabs, time) {
  const took = [];
  for (const tab of tabs) {
    await tab.waitForFunction((time) => globalThis.came[time], time, { timeout: 60_000 });
    took.push((await tab.evaluate((time) => globalThis.came[time], time)) - Date.parse(time));
  }
  return took;
}

/** A phone, where the menu is folded, says that figures are old before it is known whether the daemon is away. */
async function onAPhone() {
  say("what a phone says of figures that do not come");
  const { context, page } = await open(browser, { viewport: { width: 390, height: 844 } });
  let letGo;
  const held = new Promise((done) => {
    letGo = done;
  });
  await page.route("**/v1/figures*", async (route) => {
    await held;
    await route.continue();
  });
  await go(page, "#/machines");
  const none = page.getByRole("listitem").filter({ hasText: "figures: not read yet" });
  await none.waitFor({ timeout: 15_000 });
  assert.equal(await page.getByText("The daemon has not answered since").count(), 0);
  letGo();
  await none.waitFor({ state: "detached" });

  say("the daemon is stopped: what it says then");
  const old = page.getByRole("listitem").filter({ hasText: /^figures: read \d+ s ago/ });
  await page.locator(".freshness", { hasText: "Figures are live" }).waitFor({ state: "attached" });
  assert.equal(await old.count(), 0);
  const daemon = Number(process.env.SPILLWAY_DAEMON_PID);
  process.kill(daemon, "SIGSTOP");
  try {
    await old.waitFor({ timeout: 15_000 });
    assert.equal(await page.getByText("The daemon has not answered since").count(), 0);
  } finally {
    process.kill(daemon, "SIGCONT");
  }
  await old.waitFor({ state: "detached" });
  await context.close();
}

try {
  await onAPhone();

  say(`${TABS} tabs`);
  // What is asked while there is no daemon fails.
  const { context, page } = await open(browser, {}, { expected: /status of (502|401) |net::ERR_/ });
  const tabs = [page];
  while (tabs.length < TABS) tabs.push(await context.newPage());
  const streams = [];
  const note = (url, kind) => url.includes("/v1/event-stream") && streams.push(kind);
  context.on("request", (request) => note(request.url(), request.resourceType()));
  for (const tab of tabs) tab.on("websocket", (socket) => note(socket.url(), "websocket"));
  for (const tab of tabs) await go(tab, "#/events");
  for (const tab of tabs) {
    await tab.getByText("New ones appear by themselves").waitFor();
    await settled(tab);
    await watch(tab);
  }
  const protocol = await page.evaluate(() => performance.getEntriesByType("navigation")[0].nextHopProtocol);
  // With HTTP/1.1 the seventh tab would wait for ever for its stream.
  if (token) assert.deepEqual([protocol, streams], ["h2", Array(TABS).fill("eventsource")]);
  else assert.deepEqual([protocol, streams], ["http/1.1", Array(TABS).fill("websocket")]);
  const took = [];
  for (let i = 0; i < 3; i++) took.push(...(await arrivals(tabs, happen())));
  say(`an event is on ${TABS} screens after ${took.join(", ")} ms`);

  say("how old the figures on the screen are");
  const came = [];
  page.on("response", async (answer) => {
    if (!answer.url().includes("/v1/figures")) return;
    const at = Date.now();
    // An answer that says that nothing has changed is of its own time.
    const of = answer.status() === 200 ? Date.parse((await answer.json()).time) : at;
    came.push({ at, of });
  });
  await go(page, "#/");
  for (let i = 0; i < 20; i++) {
    await page.waitForTimeout(500);
    assert.match(await page.locator(".freshness").innerText(), /^Figures are live/);
  }
  // What is shown is oldest just before the next comes.
  const ages = came.slice(1).map(({ at }, i) => at - came[i].of);
  assert.ok(ages.length >= 4, `${ages}`);
  say(`figures are at most so old: ${ages.join(", ")} ms`);
  await go(page, "#/events");
  await watch(page);

  say("the daemon is killed");
  const before = happen();
  await ask("kill the daemon");
  await page.getByText("The daemon has not answered since").waitFor({ timeout: 20_000 });
  await ask("start the daemon");
  const back = happen();
  if (token) {
    for (const tab of tabs) await tab.getByText("Your session has ended").waitFor({ timeout: 30_000 });
    await page.getByLabel("Token").fill(token);
    await page.keyboard.press("Enter");
    for (const tab of tabs)
      await tab.getByText("Your session has ended").waitFor({ state: "detached", timeout: 5000 });
  }
  const after = await arrivals(tabs, back);
  say(`it is back: its next event is on ${TABS} screens after ${after.join(", ")} ms`);
  await page.getByText("The daemon has not answered since").waitFor({ state: "detached", timeout: 20_000 });
  await arrivals(tabs, events()[0].time);
  const all = events().map((event) => event.time);
  assert.ok(all.includes(before) && all.length < 500, `${all.length} events`);
  for (const tab of tabs) {
    assert.equal(await tab.evaluate(() => globalThis.notLoadedAgain), true, "the page was not loaded again");
    const shown = await tab
      .locator("ol.events time")
      .evaluateAll((times) => times.map((time) => time.dateTime));
    assert.deepEqual(shown, all, "every event, once, newest first");
  }
  say(`${all.length} events on each`);
  const again = [];
  for (let i = 0; i < 3; i++) again.push(...(await arrivals(tabs, happen())));
  say(`and further ones after ${again.join(", ")} ms`);
  await context.close();

  assert.ok(Math.max(...took, ...again) <= EVENT_MS, "events");
  assert.ok(
    ages.every((age) => age <= FIGURES_MS),
    "figures",
  );
  say("done");
} catch (error) {
  await tellFailure(browser, error);
  throw error;
} finally {
  await browser.close();
}
