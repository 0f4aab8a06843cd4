// What an operator does in the first hour: a catalog from the wizard, machines that run, one that fills its cache, a size from the
// curve, another version in steps, and back. Real machines; nothing is simulated.
import assert from "node:assert/strict";
import { launch, open, say, shot, spillway, tellFailure } from "./lib.mjs";

const { SPILLWAY_KERNEL, SPILLWAY_INITRD, SPILLWAY_CONSOLE_URL } = process.env;
/** Guests without KVM on a busy host need their time. */
const BOOT_MS = 400_000;

const machines = () => spillway("machine", "list").items;
const first = () => spillway("machine", "show", "desk-001").status;

const browser = await launch();
// The name that is no name is refused; and a dry run, if the catalog has just changed when the rollout ended.
const { context, page } = await open(browser, {}, { expected: /(400|412) .*dry_run=true$/ });
try {
  page.setDefaultTimeout(30_000);
  await page.goto(SPILLWAY_CONSOLE_URL);
  await page.getByRole("heading", { name: "Host", level: 1 }).waitFor();

  say("the wizard, by its words");
  await page.getByRole("navigation", { name: "Main" }).getByRole("link", { name: "Catalogs" }).click();
  await page.getByRole("link", { name: "New catalog" }).click();
  await page.getByLabel("Name", { exact: true }).fill("Desk!");
  await page.getByLabel("Image", { exact: true }).selectOption("golden");
  await page.getByText("is no name").waitFor();
  await page.getByLabel("Name", { exact: true }).fill("desk");
  await page.getByLabel("Version", { exact: true }).selectOption("1");
  await page.getByText("The daemon accepts these settings.").waitFor();
  await shot(page, "wizard-image");
  await page.getByRole("link", { name: "Continue" }).click();
  await page.getByRole("textbox", { name: "Machines", exact: true }).fill("2");
  await page.getByText("desk-002").waitFor();
  await page.getByRole("textbox", { name: "Memory", exact: true }).fill("256M");
  await page.getByLabel("Network", { exact: true }).fill("none");
  await page.getByRole("textbox", { name: "Ready when" }).fill("serial:^GUEST-UP");
  await page.getByText("More settings").click();
  await page.getByRole("textbox", { name: "Time to shut down, s" }).fill("1");
  await page.getByRole("textbox", { name: "Kernel", exact: true }).fill(SPILLWAY_KERNEL);
  await page.getByRole("textbox", { name: "Initial RAM disk" }).fill(SPILLWAY_INITRD);
  await page
    .getByRole("textbox", { name: "Kernel command line" })
    .fill("console=ttyS0 quiet loglevel=4 panic=1 cryptomgr.notests nokaslr");
  await page.getByRole("link", { name: "Continue" }).click();
  await page.getByRole("textbox", { name: "RAM tier" }).fill("4M");
  // What is no size is not left out silently.
  await page.getByRole("textbox", { name: "Overflow", exact: true }).fill("12 bananas");
  await page.getByText("Correct first: Overflow.").waitFor();
  await page.getByRole("textbox", { name: "Overflow", exact: true }).fill("64M");
  await shot(page, "wizard-cache");
  await page.getByRole("link", { name: "Continue" }).click();
  await page.getByRole("link", { name: "Continue" }).click();
  const command = await page.getByText("spillway catalog create").innerText();
  await shot(page, "wizard-review");
  assert.match(command, /--image golden:1 .*--ram 4M/s);
  await page.getByRole("button", { name: "Create the catalog" }).click();
  await page.getByRole("heading", { name: "desk", level: 1 }).waitFor();
  assert.equal(spillway("catalog", "show", "desk").spec.ram_bytes, 4 << 20);

  say("its machines run");
  await page.getByRole("button", { name: "Start all", exact: true }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Start", exact: true }).click();
  await page.getByRole("row", { name: /desk-001.*ready/ }).waitFor({ timeout: BOOT_MS });
  await page.getByRole("row", { name: /desk-002.*ready/ }).waitFor({ timeout: BOOT_MS });
  await shot(page, "catalog");

  say("one of them is told to write, on its serial console");
  await page.getByRole("link", { name: "desk-001" }).click();
  await page.getByRole("link", { name: "Serial" }).click();
  const serial = page.frameLocator("iframe.console");
  await serial.getByText("GUEST-UP").first().waitFor();
  await serial.locator("textarea").pressSequentially("fill14 a\n");
  await serial.getByText("FILLED #a").first().waitFor({ timeout: 60_000 });
  await serial.getByText("You have the keyboard.").waitFor();
  await page.getByRole("link", { name: "Disk" }).click();
  // It is filling: the figures of the last half minute have a time in which it would be full.
  await page.locator(".facts div").filter({ hasText: "Full in" }).getByText(/^\d/).waitFor();
  await page
    .getByText(/of 4\.0 MiB/)
    .first()
    .waitFor();
  // Of what the guest has written, 4 MiB are in RAM: the next figures have the rest.
  await page
    .getByText(/^1\d\.\d MiB of 64\.0 MiB/)
    .first()
    .waitFor();
  await page.getByText("the RAM tier is full").first().waitFor();
  // An event lets the page read again where the guest has written.
  await page.getByText(/MiB since the reset/).waitFor();
  if (process.env.SPILLWAY_SHOTS) {
    // The picture is of a machine that writes.
    await page.getByRole("link", { name: "Serial" }).click();
    await serial.locator("textarea").pressSequentially("fill14 a\n");
    await page.getByRole("link", { name: "Disk" }).click();
    await page
      .getByText(/^\d+\.\d MiB\/s$/)
      .first()
      .waitFor();
  }
  await shot(page, "machine");

  say("a size from the curve, live");
  await page.getByRole("link", { name: "Sizing" }).click();
  await page.getByRole("button", { name: /^No overflow/ }).click();
  const before = first().run;
  assert.equal(before.ram_bytes, 4 << 20);
  await page.evaluate(() => {
    location.hash = "#/catalogs/desk?tab=sizing";
  });
  await page.getByRole("button", { name: /^No overflow/ }).click();
  await shot(page, "sizing");
  await page.getByRole("button", { name: /^Apply/ }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Apply", exact: true }).click();
  await page.waitForFunction(() => !document.querySelector("dialog[open]"));
  const size = spillway("catalog", "show", "desk").spec.ram_bytes;
  assert.ok(size >= 12 << 20, `${size}`);
  const soon = Date.now() + 30_000;
  while (first().run.ram_bytes !== size) {
    assert.ok(Date.now() < soon, "the running disk does not take the size");
    await page.waitForTimeout(200);
  }
  const { disk_pid, vmm_pid } = first().run;
  assert.deepEqual([disk_pid, vmm_pid], [before.disk_pid, before.vmm_pid], "nothing was restarted");
  assert.equal(spillway("machine", "stats", "desk-001").ram.limit_bytes, size);

  say("another version, one machine at a time");
  await page.getByRole("link", { name: "Versions" }).click();
  await page.getByRole("combobox", { name: /^Version/ }).selectOption("2");
  await page.getByRole("combobox", { name: /^When machines take it/ }).selectOption("batch");
  await page.getByText("2 running machines have another version").waitFor();
  await page.getByRole("button", { name: "Update", exact: true }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Update", exact: true }).click();
  await page.getByRole("button", { name: "Pause" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Pause" }).click();
  await page.getByRole("button", { name: "Resume" }).waitFor();
  assert.equal(spillway("catalog", "show", "desk").rollout.paused, true);
  await shot(page, "versions");
  await page.getByRole("button", { name: "Resume" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Resume" }).click();
  await page.getByText("golden:2").first().waitFor();
  const until = Date.now() + 2 * BOOT_MS;
  while (!machines().every((m) => m.status.run?.version === 2 && m.status.ready)) {
    assert.ok(Date.now() < until, "the rollout does not end");
    await page.waitForTimeout(1000);
  }

  say("back to the first, which a machine takes when it is restarted");
  while (spillway("catalog", "show", "desk").rollout) {
    assert.ok(Date.now() < until, "the rollout has reached all machines and does not end");
    await page.waitForTimeout(200);
  }
  // The catalog has changed when the rollout ended: the page knows that from the event, before it would read the catalog anyway.
  await page.getByRole("button", { name: "Pause" }).waitFor({ state: "detached", timeout: 4000 });
  await page.getByRole("button", { name: "Roll back" }).first().click();
  await page.getByRole("dialog").getByRole("button", { name: "Roll back" }).click();
  await page.waitForFunction(() => !document.querySelector("dialog[open]"));
  assert.equal(spillway("catalog", "show", "desk").version, 1);
  assert.equal(first().run.version, 2);
  spillway("machine", "restart", "desk-001");
  const again = Date.now() + 2 * BOOT_MS;
  while (first().run?.version !== 1 || !first().ready) {
    assert.ok(Date.now() < again, "the restarted machine does not run the first version");
    await page.waitForTimeout(1000);
  }

  await context.close();
  say("done");
} catch (error) {
  await tellFailure(browser, error);
  throw error;
} finally {
  await browser.close();
}
