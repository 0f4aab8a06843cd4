// The console as a page of Cockpit, as far as it differs from the other doors: the menu, addresses, figures, events, an act, the serial
// console of a guest, a report, colours. Real machines; nothing is simulated.
//
//   node e2e/cockpit.mjs works       a daemon with the catalog desk, whose guests say WORKS and answer "state"
//   node e2e/cockpit.mjs WORDS       there is no way to the daemon, and the page says so with these words
//
// SPILLWAY_CONSOLE_URL is the address of Cockpit.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { axe, base, foreign, launch, open, tellFailure } from "./lib.mjs";

const [expected] = process.argv.slice(2);
/** Guests without KVM on a busy host need their time. */
const BOOT_MS = 400_000;
const NAME = "cockpit1:localhost/spillway";

const spillway = (...words) => execFileSync(process.env.SPILLWAY, [...words, "--json"], { encoding: "utf8" });
const begun = Date.now();
const say = (text) => console.log(`[${((Date.now() - begun) / 1000).toFixed(0)} s] ${text}`);

const browser = await launch();
const { page, seen } = await open(browser);
page.setDefaultTimeout(30_000);
const own = [];
page.on("console", (message) => {
  const isOurs = message.location().url.includes("/spillway/");
  if (isOurs && ["error", "warning"].includes(message.type())) own.push(message.text());
});
const frame = page.frameLocator(`iframe[name="${NAME}"]`);

/** What axe finds in the page's frame, at this place. */
async function assertAccessible(place) {
  assert.deepEqual(await axe(page.frame({ name: NAME })), [], place);
}

/** Nothing of the console went wrong. Cockpit's own pages miss services that a machine of tests does not have. */
function assertClean() {
  assert.deepEqual(
    { violations: seen.violations, foreign: foreign(seen), own },
    { violations: [], foreign: [], own: [] },
  );
}

async function works() {
  say("the menu leads to the page, which shows figures");
  await page.goto(base);
  await page.getByRole("link", { name: "Spillway" }).click();
  await frame.getByRole("heading", { name: "Host", level: 1 }).waitFor();
  await frame.getByText("Figures are live, events follow").waitFor();
  await frame.getByRole("link", { name: "1 machine" }).waitFor();
  await frame.getByText("uid 0 (admin)").waitFor();
  await assertAccessible("host");

  say("its address has the page and the filter, also over a reload");
  await frame.getByRole("navigation", { name: "Main" }).getByRole("link", { name: "Catalogs" }).click();
  await frame.getByRole("row", { name: /desk/ }).waitFor();
  await frame.getByRole("searchbox").fill("des");
  await page.waitForURL(/\/spillway#\/catalogs\?filter=des$/);
  await page.reload();
  await frame.getByRole("heading", { name: "Catalogs", level: 1 }).waitFor();
  assert.equal(await frame.getByRole("searchbox").inputValue(), "des");
  await assertAccessible("catalogs");

  say("a machine is started here");
  await page.goto(`${base}spillway#/machines/desk-001`);
  await frame.getByRole("button", { name: "Start", exact: true }).click();
  await frame.getByRole("dialog").getByRole("button", { name: "Start", exact: true }).click();
  await frame.getByText("it is ready").first().waitFor({ timeout: BOOT_MS });
  await assertAccessible("machine");

  say("somebody types into its serial console");
  await frame.getByRole("link", { name: "Serial" }).click();
  const serial = frame.frameLocator("iframe.console");
  await serial.getByText("WORKS").first().waitFor();
  await serial.locator("textarea").pressSequentially("state a\n");
  await serial
    .getByText(/STATE image=version-1 .*#a/)
    .first()
    .waitFor({ timeout: 60_000 });
  await serial.getByText("You have the keyboard.").waitFor();
  await assertAccessible("serial");

  say("its screen is shown");
  await frame.getByRole("link", { name: "Screen" }).click();
  const screen = frame.frameLocator("iframe.console");
  await screen.getByText("Connected", { exact: true }).waitFor();
  await screen.getByRole("button", { name: "Send Ctrl+Alt+Del" }).click();
  // QEMU's own size: what is shown came from there.
  assert.ok((await screen.locator("canvas").evaluate((canvas) => canvas.width)) >= 640);

  say("an event appears within a second");
  await page.goto(`${base}spillway#/events`);
  await frame.getByText("New ones appear by themselves.").waitFor();
  await frame.getByRole("combobox", { name: "Kind" }).selectOption("claimed");
  await frame.getByText("0 events").waitFor();
  spillway("machine", "claim", "desk");
  await frame.getByText("1 event.").waitFor({ timeout: 1000 });

  say("a report is shown, with its own style and the rights of a report");
  const answer = page.waitForResponse((response) => response.url().includes("/channel/"));
  await page.goto(`${base}spillway#/reports/first`);
  // The daemon's policy, not that of Cockpit's pages.
  assert.match((await answer).headers()["content-security-policy"] ?? "", /^sandbox; default-src 'none'/);
  const heading = frame.frameLocator("iframe.report").getByRole("heading", { name: "A report" });
  await heading.waitFor();
  assert.equal(await heading.evaluate((h1) => getComputedStyle(h1).color), "rgb(18, 52, 86)");

  say("colours follow Cockpit's");
  await page.goto(`${base}spillway#/machines`);
  await frame.getByRole("heading", { name: "Machines", level: 1 }).waitFor();
  await page.evaluate(() => localStorage.setItem("shell:style", "dark"));
  await frame.locator('html[data-theme="dark"]').waitFor();
  await assertAccessible("dark");
}

async function says(words) {
  say(`without a way to the daemon: ${words}`);
  await page.goto(`${base}spillway`);
  const alert = frame.getByRole("alert");
  await alert.getByText(words).waitFor();
  assert.match(await alert.innerText(), /Turn on administrative access/);
  await assertAccessible("alert");
  await page.goto(`${base}cockpit/@localhost/spillway/serial.html#/machines/desk-001`);
  await page.getByText(words).waitFor();
}

try {
  await (expected === "works" ? works() : says(expected));
  assertClean();
  say("done");
} catch (error) {
  await tellFailure(browser, error);
  throw error;
} finally {
  await browser.close();
}
