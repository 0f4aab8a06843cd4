// The console of a host of a fleet: its pages show hosts and shares, acts by keyboard and by pointer change them, and another host is
// shown and used through this one.
//
// A fleet "site" of the hosts h0, whose console this is, and h1 is there, with a catalog "desk" of four machines of tiny:1, whose
// guests say WORKS on their consoles and then repeat each line.
import assert from "node:assert/strict";
import { axeInThemes, excess, go, launch, open, say, settled, shot, spillway, tellFailure } from "./lib.mjs";

const BOOT_MS = 300_000;
const browser = await launch();
// A disk that was started a moment ago has no latency yet, and a host that lives is not declared dead.
const expected = /409 \(Conflict\) .*\/(latency|dirty-ranges|fleet\/hosts\/h1$)/;
const { context, page } = await open(browser, {}, { expected });
page.setDefaultTimeout(30_000);
const sockets = [];
page.on("websocket", (socket) => sockets.push(socket.url()));

/** What is shown is accessible in both themes, and as wide as a screen, also a narrow one. */
async function assertAccessible(what) {
  const { width, height } = page.viewportSize();
  for (const wide of [width, 390]) {
    await page.setViewportSize({ width: wide, height });
    assert.deepEqual(await axeInThemes(page), [], `${what}, ${wide} pixels`);
    assert.ok((await excess(page)) <= 0, `${what}, ${wide} pixels: ${await excess(page)} too many`);
  }
  await page.setViewportSize({ width, height });
}

const main = page.getByRole("navigation", { name: "Main" });
const dialog = page.getByRole("dialog");
const row = (name) => page.getByRole("row", { name });
const hostOf = (name) => spillway("fleet", "host", "show", name);

/** Waits until the command line says something of the fleet. */
async function until(what, holds) {
  const soon = Date.now() + BOOT_MS;
  while (!holds()) {
    assert.ok(Date.now() < soon, `not so: ${what}`);
    await page.waitForTimeout(500);
  }
}

async function theFleet() {
  say("the fleet and its hosts");
  // Where etcd was without a leader for a moment, because the processors were taken, that is said there for a while.
  await main.getByRole("link", { name: /^Fleet( warning)?$/ }).click();
  await page.getByRole("heading", { name: "Fleet site", level: 1 }).waitFor();
  for (const [name, zone] of [
    ["h0", "z0"],
    ["h1", "z1"],
  ])
    await row(new RegExp(`^${name} ${zone} alive 2/2 machines of ${name} 0 `)).waitFor();
  await page.getByText("Member of etcd").waitFor();
  await shot(page, "fleet");
  await assertAccessible("the fleet");

  say("a host is cordoned by the keyboard alone, and uncordoned by a click");
  await page.getByRole("button", { name: "Cordon h1" }).focus();
  await page.keyboard.press("Enter");
  await dialog.getByText("spillway fleet host cordon h1").waitFor();
  await assertAccessible("the dialog");
  await dialog.getByRole("button", { name: "Cordon", exact: true }).focus();
  await page.keyboard.press("Enter");
  await row(/^h1 z1 alive cordoned/).waitFor();
  assert.equal(hostOf("h1").cordoned, true);
  const focused = () => page.evaluate(() => document.activeElement?.tagName);
  assert.notEqual(await focused(), "BODY", "the focus is not lost");
  await page.getByRole("button", { name: "Uncordon h1" }).click();
  await dialog.getByRole("button", { name: "Uncordon" }).click();
  await row(/^h1 z1 alive 2\/2/).waitFor();
  assert.equal(hostOf("h1").cordoned, false);

  say("a host, and what it is to have");
  await page.getByRole("link", { name: "h1", exact: true }).click();
  await page.getByRole("heading", { name: "h1", level: 1 }).waitFor();
  await row(/^desk 1 2 2 2 2 0 0/).waitFor();
  await shot(page, "fleet-host");
  await assertAccessible("a host");
  // Who lives can be declared dead by nobody.
  for (const name of ["Declare dead", "Remove"])
    assert.ok(await page.getByRole("button", { name, exact: true }).isDisabled(), name);
}

async function anotherHost() {
  say("the machines of the other host, also when the page is loaded again");
  await page.getByRole("link", { name: "Machines of h1" }).click();
  for (let i = 0; i < 2; i++) {
    await row(/desk-h1-001.*ready/).waitFor();
    await row(/desk-h1-002.*ready/).waitFor();
    assert.equal(await page.getByText("desk-h0-001").count(), 0, "none of this host");
    assert.match(page.url(), /#\/@h1\/machines$/);
    assert.match(await page.title(), /Machines - h1/);
    assert.equal(await page.getByRole("combobox", { name: /^Host/ }).inputValue(), "h1");
    if (i === 0) await page.reload();
  }
  await page.getByText("events follow").waitFor();
  await shot(page, "fleet-machines");
  await assertAccessible("machines of another host");

  say("its serial console");
  await page.getByRole("link", { name: "desk-h1-001" }).click();
  await page.getByRole("link", { name: "Serial" }).click();
  const serial = page.frameLocator("iframe.console");
  await serial.getByText("WORKS").first().waitFor();
  await serial.locator("textarea").pressSequentially("over-two-hosts\n");
  // The line, and its repetition by the guest.
  await serial.getByText("over-two-hosts").nth(1).waitFor();
  assert.ok(
    sockets.some((url) => url.endsWith("/v1/fleet/hosts/h1/api/v1/machines/desk-h1-001/console")),
    sockets.join(" "),
  );

  say("an act on its machine, and the equal command");
  const run = () => spillway("--host", "h1", "machine", "show", "desk-h1-001").status.run?.vmm_pid;
  const before = run();
  await page.getByRole("button", { name: "Restart" }).click();
  await dialog.getByText("spillway --host h1 machine restart desk-h1-001").waitFor();
  await dialog.getByRole("button", { name: "Restart" }).click();
  await until("the machine has another process", () => run() && run() !== before);

  say("and back to this host, by the switch");
  await main.getByRole("link", { name: "Machines", exact: true }).click();
  await row(/desk-h1-002/).waitFor();
  await page.getByRole("combobox", { name: /^Host/ }).selectOption("");
  await row(/desk-h0-001/).waitFor();
  assert.match(page.url(), /#\/machines$/);
  assert.equal(await page.getByText("desk-h1-001").count(), 0);
}

async function catalogs() {
  say("a catalog of the fleet");
  await main.getByRole("link", { name: "Fleet catalogs" }).click();
  await row(/^desk tiny:1 \d\/4 0 2 0/).waitFor();
  await assertAccessible("the catalogs");
  await page.getByRole("link", { name: "desk", exact: true }).click();
  await row(/^h0 .*z0 1 2 2 /).waitFor();
  await row(/^h1 .*z1 1 2 2 /).waitFor();
  await shot(page, "fleet-catalog");
  await assertAccessible("a catalog");
  for (const tab of ["Versions", "Settings"]) {
    await page.getByRole("link", { name: tab, exact: true }).click();
    await settled(page);
    await assertAccessible(tab);
  }

  say("it is scaled");
  await page.getByRole("button", { name: "Scale" }).click();
  await dialog.getByLabel("Machines on all hosts").fill("three");
  assert.ok(await dialog.getByRole("button", { name: "Scale" }).isDisabled());
  await dialog.getByLabel("Machines on all hosts").fill("3");
  await dialog.getByText("spillway fleet catalog scale desk 3").waitFor();
  await dialog.getByRole("button", { name: "Scale" }).click();
  await page.getByText("of 3 machines ready on 2 hosts").waitFor();
  assert.equal(spillway("fleet", "catalog", "show", "desk").spec.count, 3);

  say("an update names the versions that the host has");
  await page.getByRole("button", { name: "Update" }).click();
  await dialog.getByText("This host has 1.").waitFor();
  await dialog.getByRole("button", { name: "Cancel" }).click();
}

/** What takes long to bring about: answers as the daemon would give them. */
async function trouble() {
  say("a rollout that has halted, and machines without a host");
  const rollout = {
    ...{ state: "halted", reason: "h1: 1 machine has failed with tiny:2, and 0 may fail" },
    ...{ from_image: "tiny", from_version: 1, to_image: "tiny", to_version: 2, wave: 1, waves: 4 },
    ...{ hosts_started: 1, hosts_done: 0, hosts: 2, failed: 1, max_failed: 0, deadline_seconds: 600 },
    ...{ since: new Date().toISOString(), changed: new Date().toISOString() },
  };
  const more = {
    rollout,
    unplaced: 2,
    unplaced_because: { h0: "64 MiB of memory are left, 192 MiB needed" },
  };
  const asked = [];
  await page.route(/\/v1\/fleet\/catalogs\/desk(\/rollout)?(\?.*)?$/, async (route) => {
    const request = route.request();
    if (request.method() === "POST") {
      asked.push(request.postDataJSON());
      return route.fulfill({ json: {} });
    }
    const answer = await route.fetch();
    return route.fulfill({ response: answer, json: { ...(await answer.json()), ...more } });
  });
  await go(page, "#/fleet-catalogs/desk");
  await page.getByText("It has halted: no further machine is restarted.").waitFor();
  await page.getByText("64 MiB of memory are left").waitFor();
  await page.getByText("halted, wave 1 of 4", { exact: true }).waitFor();
  await shot(page, "fleet-rollout");
  await assertAccessible("a rollout");
  await page.getByRole("button", { name: "Resume" }).click();
  await dialog.getByText("spillway fleet catalog rollout resume desk").waitFor();
  await dialog.getByRole("button", { name: "Resume" }).click();
  await page.waitForFunction(() => !document.querySelector("dialog[open]"));
  assert.deepEqual(asked, [{ action: "resume" }]);
  await page.unrouteAll({ behavior: "wait" });

  say("a host that is silent is declared dead only by who types its name");
  await page.route(/\/v1\/fleet\/hosts(\?.*)?$/, async (route) => {
    const answer = await route.fetch();
    const { items } = await answer.json();
    const silent = { state: "silent", reason: "it has been silent for 16 s", address: null, version: null };
    const all = items.map((host) => (host.name === "h1" ? { ...host, ...silent } : host));
    return route.fulfill({ response: answer, json: { items: all } });
  });
  await go(page, "#/fleet");
  await row(/^h1 z1 silent it has been silent for 16 s last known 2\/2/).waitFor();
  await page.getByRole("button", { name: "Declare dead h1" }).click();
  await dialog.getByText("Say this only if you know that h1 is off.").waitFor();
  await assertAccessible("the dialog of a death");
  const declare = dialog.getByRole("button", { name: "Declare dead" });
  assert.ok(await declare.isDisabled());
  await dialog.getByLabel(/^Type h1/).fill("h1");
  await declare.click();
  // It lives, and the daemon says so.
  await dialog.getByText("Refused.").waitFor();
  await dialog.getByRole("button", { name: "Cancel" }).click();
  await page.unrouteAll({ behavior: "wait" });

  say("a host that is refused, and the brake");
  const host = (change) => (route) =>
    route
      .fetch()
      .then(async (answer) =>
        route.fulfill({ response: answer, json: { ...(await answer.json()), ...change } }),
      );
  await page.route(
    /\/v1\/fleet(\?.*)?$/,
    host({
      membership: "refused",
      reason: "The records of the fleet are gone.",
      brake: "3 of 4 are silent",
      placer: "h0",
    }),
  );
  await go(page, "#/fleet");
  await page.getByText("The records of the fleet are gone.").waitFor();
  await page.getByText("Lost hosts are not replaced.").waitFor();
  await assertAccessible("a refused host");
  await page.unrouteAll({ behavior: "wait" });
}

try {
  await go(page, "#/");
  await theFleet();
  await anotherHost();
  await catalogs();
  await trouble();
  await context.close();
  say("done");
} catch (error) {
  await tellFailure(browser, error);
  throw error;
} finally {
  await browser.close();
}
