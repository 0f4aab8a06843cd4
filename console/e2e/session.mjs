// A session ends under open pages, over TLS: the pages are covered, and go on where they were when the same caller signs in again.
// For anybody else they begin anew.
import assert from "node:assert/strict";
import {
  ask,
  axe,
  base,
  go,
  isCovered,
  launch,
  objects,
  open,
  say,
  settled,
  signIn,
  spillway,
  tellFailure,
} from "./lib.mjs";

const browser = await launch();
const generation = (machine) => spillway("machine", "stats", machine).generation;
const ended = (page) => page.getByRole("dialog", { name: "Your session has ended" });
const isFocused = (control) => control.evaluate((element) => element === document.activeElement);
/** Marks a page, so that it is known whether it was loaded again. */
const mark = (page) =>
  page.evaluate(() => {
    globalThis.notLoadedAgain = true;
  });
const isMarked = (page) => page.evaluate(() => globalThis.notLoadedAgain === true);
/** Waits until something has come about in this script. */
async function waitUntil(is, what) {
  for (const until = Date.now() + 10_000; !is(); await new Promise((done) => setTimeout(done, 50)))
    assert.ok(Date.now() < until, what);
}
const gone = (page) => ended(page).waitFor({ state: "detached" });

/** Signs in again over a page. */
async function signInAgain(page, token) {
  await ended(page).waitFor({ timeout: 20_000 });
  await ended(page).getByLabel("Token").fill(token);
  await page.keyboard.press("Enter");
}

/** The time of a session is over by the clock of the browser: nobody waits for an answer until the page is covered. */
async function byTheClock(context) {
  say("a page whose session is over by the clock is covered before the daemon answers");
  const page = await context.newPage();
  let held;
  let count = 0;
  await page.route("**/v1/session", async (route) => {
    const response = await route.fetch();
    count++;
    if (count > 1) held = () => route.fulfill({ response });
    else await route.fulfill({ response, json: { ...(await response.json()), seconds_left: 1 } });
  });
  await go(page, "#/machines");
  await mark(page);
  await ended(page).waitFor();
  assert.equal(await isCovered(page), true, "nothing is seen of the page");
  await waitUntil(() => held, "it asks");
  await held();
  await gone(page);
  assert.deepEqual([await isMarked(page), count], [true, 2], "the page was not loaded again");
  await page.close();
}

/** An act is found out while a session ends: its dialog is not opened over the cover, and not under it. */
async function noActOverTheCover(context) {
  say("an act that is found out when its session has ended is not asked for");
  spillway("catalog", "create", "keep", "--image", "golden", "--type", "dedicated", "--mode", "persistent");
  const page = await context.newPage();
  await go(page, "#/images/golden");
  const commit = page.getByRole("button", { name: "Commit a machine's disk" });
  const act = page.getByRole("dialog", { name: /^Make a version of golden/ });
  // Opened before anything else can happen: what comes later comes above it.
  await page.getByRole("button", { name: "Import a file" }).evaluate(async (button) => {
    button.click();
    for (let i = 0; i < 10; i++) await null;
    if (!document.querySelector("dialog.act").open) throw new Error("the dialog is not open yet");
  });
  await page.keyboard.press("Escape");
  await page.getByRole("dialog").waitFor({ state: "detached" });
  let held;
  await page.route("**/v1/machines?catalog=keep*", async (route) => {
    const response = await route.fetch();
    held = () => route.fulfill({ response });
  });
  await commit.click();
  await waitUntil(() => held, "the machines are asked for");
  await context.clearCookies();
  await ended(page).waitFor({ timeout: 20_000 });
  const answered = page.waitForResponse(/catalog=keep/);
  await held();
  await (await answered).finished();
  // The page has taken it when it has taken another answer.
  await page.evaluate(() => fetch(new URL("../v1/session", document.baseURI)));
  await page.evaluate(() => new Promise(requestAnimationFrame));
  assert.equal(await act.count(), 0);
  assert.equal(await page.locator("dialog").count(), 1, "only the cover is there");
  await signInAgain(page, "admin");
  await gone(page);
  await page.unroute("**/v1/machines?catalog=keep*");
  await commit.click();
  await act.waitFor();
  await page.close();
  spillway("catalog", "delete", "keep");
}

/** Windows of consoles begin anew when somebody has signed in. */
async function consolesAnew(context, { form }, machine) {
  say("windows of consoles try again when somebody has signed in");
  const windows = [];
  for (const kind of ["serial", "screen"]) {
    const page = await context.newPage();
    await page.goto(`${base}${kind}.html#/machines/${machine}`);
    await page.getByText(/the machine has no/).waitFor();
    windows.push(page);
  }
  await context.clearCookies();
  for (const page of windows) {
    await page.getByRole("button", { name: "Connect again" }).click();
    await page.getByText("you are not signed in").waitFor();
  }
  await signInAgain(form, "admin");
  for (const page of windows) {
    await page.getByText(/the machine has no/).waitFor();
    await page.close();
  }
}

/** The daemon dies and comes back, and knows no session any more. */
async function daemonAnew(tabs) {
  say("the daemon is killed, and started");
  const { form, settings, dialog } = tabs;
  await ask("kill the daemon");
  await ask("start the daemon");
  for (const page of Object.values(tabs)) {
    await ended(page).waitFor({ timeout: 20_000 });
    await page.waitForFunction(() => document.title === "Sign in - Spillway");
    assert.equal(await isCovered(page), true, "nothing is seen of the page");
    assert.deepEqual(await axe(page), []);
    for (let i = 0; i < 3; i++) await page.keyboard.press("Escape");
    assert.equal(await isFocused(ended(page).getByLabel("Token")), true, "Escape leads nowhere");
  }
  await signInAgain(form, "wrong");
  await form.getByText("this token is not known").waitFor();
  assert.equal(await isFocused(ended(form).getByLabel("Token")), true);
  // What had the focus cannot have it any more.
  const field = settings.getByRole("textbox", { name: "Duration of claims, s" });
  await field.evaluate((input) => {
    input.disabled = true;
  });
  say("somebody signs in again, in one tab");
  await signInAgain(form, "admin");
  for (const page of Object.values(tabs)) {
    await gone(page);
    assert.equal(await isMarked(page), true, "the page was not loaded again");
    assert.match(await page.locator(".side-foot").innerText(), /admin/);
  }
  assert.equal(await form.title(), "New catalog - Spillway");
  const name = form.getByLabel("Name", { exact: true });
  assert.deepEqual([await name.inputValue(), await isFocused(name)], ["kept", true]);
  await form.getByText(/^The daemon (would make this catalog|accepts these settings)/).waitFor();
  assert.equal(await field.inputValue(), "4711");
  assert.equal(await isFocused(settings.locator("#page-title")), true, "the focus is not lost");
  await settings.getByRole("button", { name: "Review and apply" }).click({ trial: true });
  assert.equal(await dialog.getByRole("checkbox", { name: /^Select desk-/, checked: true }).count(), 2);
}

/** An act fails, as its session has ended, and is done when somebody has signed in again. */
async function actAgain({ dialog }, machine) {
  say("an act without a session is refused, and can be done again");
  const before = generation(machine);
  const act = dialog.getByRole("dialog", { name: /^Reset/ });
  const reset = act.getByRole("button", { name: "Reset" });
  await dialog.context().clearCookies();
  // Pressed before the page knows, and before it is covered.
  await reset.evaluate((button) => button.click());
  await ended(dialog).waitFor({ timeout: 20_000 });
  await act.getByText("Refused.").waitFor();
  assert.equal(generation(machine), before);
  await signInAgain(dialog, "admin");
  await gone(dialog);
  assert.match(await act.getByRole("alert").innerText(), /^Refused\./);
  assert.equal(await isFocused(reset), true, "the focus is not lost");
  await dialog.keyboard.press("Enter");
  await act.waitFor({ state: "detached" });
  // The dialog is closed when the act is recorded: the machine is reset a moment later.
  await waitUntil(() => generation(machine) > before, "the machine is reset");
}

/** Somebody else signs in: every page begins anew with their role, and nothing is left of what was filled in. */
async function anotherRole(tabs) {
  say("another role signs in");
  const { form, settings, dialog } = tabs;
  await form.context().clearCookies();
  await signInAgain(settings, "read");
  for (const page of Object.values(tabs)) {
    await page.waitForFunction(() => !globalThis.notLoadedAgain);
    await page.locator(".side-foot", { hasText: "(read)" }).waitFor();
    await settled(page);
    assert.equal(await ended(page).count(), 0);
    assert.equal(await page.locator("main input:enabled:not([type=search], [type=checkbox])").count(), 0);
  }
  await form.getByText("Making a catalog needs the role admin.").waitFor();
  assert.equal(await settings.getByText("4711").count(), 0);
  await dialog.getByRole("checkbox", { name: "Select desk-001" }).check();
  const acts = dialog.getByRole("region", { name: "Selection" }).getByRole("button");
  for (const name of ["Reset", "Stop"]) assert.equal(await acts.getByText(name).isEnabled(), false, name);
}

/** Who signs out is out in all tabs, and nothing is left there. */
async function signOut(tabs) {
  say("somebody signs out, and in");
  for (const page of Object.values(tabs)) await mark(page);
  await tabs.form.getByRole("button", { name: "Sign out" }).click();
  for (const page of Object.values(tabs)) {
    await page.waitForSelector("main.login");
    assert.equal(await isMarked(page), false, "the page was loaded again");
    assert.equal(await ended(page).count(), 0);
  }
  await signIn(tabs.form, "admin");
  for (const page of Object.values(tabs)) await page.waitForSelector(".shell");
}

try {
  const { context, page: form } = await open(
    browser,
    {},
    { expected: /status of 401 |status of 502 |net::ERR_/ },
  );
  await go(form, "#/catalogs/new");
  const { machine } = await objects(form);
  const tabs = { form, settings: await context.newPage(), dialog: await context.newPage() };
  const { settings, dialog } = tabs;
  await go(settings, "#/catalogs/desk?tab=settings");
  await settings.getByRole("textbox", { name: "Duration of claims, s" }).fill("4711");
  await settings.getByText("1 setting changed").waitFor();
  await go(dialog, "#/machines");
  for (const name of [machine, "desk-003"])
    await dialog.getByRole("checkbox", { name: `Select ${name}` }).check();
  await dialog.getByRole("region", { name: "Selection" }).getByRole("button", { name: "Reset" }).click();
  await dialog.getByRole("dialog").waitFor();
  await form.getByLabel("Image", { exact: true }).selectOption("golden");
  await form.getByLabel("Name", { exact: true }).fill("kept");
  for (const page of Object.values(tabs)) {
    await mark(page);
    assert.equal(await isCovered(page), false);
  }
  await byTheClock(context);
  await daemonAnew(tabs);
  await actAgain(tabs, machine);
  await noActOverTheCover(context);
  await consolesAnew(context, tabs, machine);
  await anotherRole(tabs);
  await signOut(tabs);
  assert.ok(base.startsWith("https:"));
  await context.close();
  say("done");
} catch (error) {
  await tellFailure(browser, error);
  throw error;
} finally {
  await browser.close();
}
