// What is wrong with a host comes first, and each act beside it mends it: a cache that is full, machines that have failed, a store that is
// away. All of it is real.
//
// SPILLWAY, SPILLWAY_SOCKET   the command line, and its daemon
// SPILLWAY_MACHINES           the folder that machines run in
// SPILLWAY_REGISTRY_FOLDER    a folder of the daemon's host in which the test may make a store
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdirSync, renameSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { axe, axeInThemes, excess, go, launch, open, shot, spillway } from "./lib.mjs";

const { SPILLWAY_MACHINES: machines, SPILLWAY_REGISTRY_FOLDER: folder } = process.env;
const skip = machines && folder ? false : "SPILLWAY_MACHINES and SPILLWAY_REGISTRY_FOLDER are not set";
const MENDED_MS = 30_000;
/** The host may have been used for this test before. Names of machines are short. */
const unique = Date.now().toString(36).slice(-4);
const [tight, lost, away] = ["tight", "lost", "away"].map((what) => `${what}-${unique}`);

let browser;
before(async () => {
  browser = await launch();
});
after(() => browser?.close());

/** Writes 96 KiB to a machine's disk, at once. */
function write(machine) {
  const script = `import nbd
disk = nbd.NBD()
disk.connect_uri("nbd+unix:///?socket=${machines}/${machine}/disk.nbd")
disk.pwrite(b"x" * 24 * 4096, 0)`;
  // Debian's own: libnbd is a package of it.
  return spawn("/usr/bin/python3", ["-c", script], { stdio: "inherit" });
}

test("what is wrong is first, and the act beside it mends it", { skip }, async (t) => {
  spillway("catalog", "create", tight, "--image", "golden", "--count", "1", "--mode", "ram", "--ram", "64K");
  spillway("machine", "start", `${tight}-001`, "--wait");
  const writer = write(`${tight}-001`);
  const written = once(writer, "exit");
  const store = join(folder, away);
  const back = () => existsSync(`${store}-too`) && renameSync(`${store}-too`, store);
  // Also if something fails: the host is used further.
  t.after(() => {
    writer.kill();
    back();
  });
  mkdirSync(store, { recursive: true });
  spillway("store", "add", away, store, "--class", "local");
  const limits = ["--ram", "1M", "--overflow", "16M", "--overflow-store", away];
  spillway("catalog", "create", lost, "--image", "golden", "--count", "2", ...limits);
  renameSync(store, `${store}-too`);
  spillway("machine", "start", "--catalog", lost);

  const { context, page } = await open(browser);
  await go(page, "#/");
  const wrong = page.getByRole("region", { name: "What is wrong" });
  const item = (text) => wrong.getByRole("listitem").filter({ hasText: text });
  const full = item(`1 write cache is full in ${tight}: writes wait or fail`);
  const failed = item(`2 machines have failed in ${lost}`);
  const unknown = item(`The space of the store ${away} is not known`);
  for (const one of [full, failed, unknown]) await one.waitFor({ timeout: MENDED_MS });
  assert.match(await wrong.getByRole("listitem").first().innerText(), /^critical/i, "the worst is first");
  await shot(page, "host-wrong");
  for (const width of [1280, 390]) {
    await page.setViewportSize({ width, height: 900 });
    assert.deepEqual(await axeInThemes(page), [], `${width} pixels`);
    assert.ok((await excess(page)) <= 0, `${width} pixels`);
  }
  await go(page, "#/stores");
  const listed = page.getByRole("listitem").filter({ hasText: store });
  await listed.getByText("not measured").waitFor();

  await go(page, "#/");
  const dialog = page.getByRole("dialog");
  await full.getByRole("button", { name: /^Double the limit/ }).click();
  await dialog.getByText("The limit changes from 64.0 KiB to 128.0 KiB").waitFor();
  assert.deepEqual(await axeInThemes(page), [], "the dialog");
  assert.equal(writer.exitCode, null, "what was written waits");
  await dialog.getByRole("button", { name: "Apply", exact: true }).click();
  assert.deepEqual(await written, [0, null], "what waited is written");
  assert.equal(spillway("catalog", "show", tight).spec.ram_bytes, 128 << 10);
  await full.waitFor({ state: "detached", timeout: MENDED_MS });

  back();
  await failed.getByRole("button", { name: /^Start them again/ }).click();
  await dialog.getByRole("heading", { name: "Start 2 machines?" }).waitFor();
  assert.deepEqual(await axe(page), []);
  await dialog.getByRole("button", { name: "Start", exact: true }).click();
  for (const one of [failed, unknown]) await one.waitFor({ state: "detached", timeout: MENDED_MS });
  // What has begun to start has not failed any more, and does not run yet.
  const until = Date.now() + MENDED_MS;
  for (const number of ["001", "002"])
    for (;;) {
      const { phase } = spillway("machine", "show", `${lost}-${number}`).status;
      if (phase === "running") break;
      assert.ok(Date.now() < until, `${lost}-${number}: ${phase}`);
      await page.waitForTimeout(200);
    }
  await context.close();
});

// The last, as it stops all machines.
test("a closed host says so, and is opened where it says it", { skip }, async (t) => {
  const { context, page } = await open(browser);
  t.after(() => spillway("host", "open"));
  spillway("host", "close");
  await go(page, "#/");
  const notice = page.locator(".notice").filter({ hasText: "The host is closed." });
  await notice.getByRole("button", { name: "Open the host" }).click();
  assert.deepEqual(await axeInThemes(page), []);
  await page.getByRole("dialog").getByRole("button", { name: "Open", exact: true }).click();
  await notice.waitFor({ state: "detached" });
  assert.equal(spillway("host", "show").closed, false);
  await context.close();
});
