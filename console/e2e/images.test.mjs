// Images from a file to a registry and back: each act through its dialog, against the real daemon.
//
// SPILLWAY_IMAGE_FILE        a raw disk image on the daemon's host, which it may read
// SPILLWAY_REGISTRY_FOLDER   a folder there in which the test may make a registry
// SPILLWAY_DOWNLOAD_PORT     a free port: the daemon may download from http://127.0.0.1:PORT
// SPILLWAY_CONSOLE_TOKEN     if the address needs one: then a token with the name and value "read" exists too
import assert from "node:assert/strict";
import { once } from "node:events";
import { copyFileSync, mkdirSync, renameSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { axe, axeInThemes, base, excess, go, launch, open, settled, signIn } from "./lib.mjs";

const {
  SPILLWAY_IMAGE_FILE: file,
  SPILLWAY_REGISTRY_FOLDER: folder,
  SPILLWAY_DOWNLOAD_PORT: port,
  SPILLWAY_SHOTS: shots,
} = process.env;
const needs = {
  skip:
    file && folder && port
      ? false
      : "SPILLWAY_IMAGE_FILE, SPILLWAY_REGISTRY_FOLDER and SPILLWAY_DOWNLOAD_PORT are not set",
};
/** The host may have been used for this test before. */
const unique = Date.now().toString(36);
const image = `zz-${unique}`;
const hub = `hub-${unique}`;
/** Operations take their time on a busy host. */
const DONE_MS = 60_000;

/** What was just deleted is asked for once more, before its page is left. */
const DELETED = new RegExp(`404 .*/v1/images/${image}`);

let browser;
before(async () => {
  browser = await launch();
});
after(() => browser?.close());

/** The open dialog, which is no obstacle by the rules of axe. */
async function dialogOf(page, name) {
  const dialog = page.getByRole("dialog", { name });
  await dialog.waitFor();
  assert.deepEqual(await axeInThemes(page), [], `the dialog '${name}'`);
  if (shots) await page.screenshot({ path: `${shots}/${String(name).replace(/[^a-z]+/gi, "-")}.png` });
  return dialog;
}

/** Presses the button that carries the act of a dialog out, and waits until it is closed. */
async function carryOut(dialog, verb) {
  await dialog.getByRole("button", { name: verb, exact: true }).click();
  await dialog.waitFor({ state: "detached" });
}

const button = (page, name) => page.getByRole("button", { name, exact: true });
const command = (dialog) => dialog.locator("pre").innerText();
/** The row of a version on the page of its image. */
const versionRow = (page, version) =>
  page.getByRole("table", { name: /^Versions of / }).getByRole("row", { name: `Version ${version}` });
const operation = (page, what) =>
  page.getByRole("region", { name: "Operations" }).getByRole("listitem").filter({ hasText: what });

test("an image is imported, and its format is asked for", needs, async () => {
  const { context, page } = await open(browser);
  await go(page, "#/images");
  await button(page, "Import a file").click();
  let dialog = await dialogOf(page, "Import an image");
  await dialog.getByLabel("Image", { exact: true }).fill(image);
  await dialog.getByLabel("File", { exact: true }).fill("disk.raw");
  await dialog.getByText("It is an absolute path.").waitFor();
  await dialog.getByLabel("File", { exact: true }).fill(file);
  assert.equal(
    await dialog.getByLabel("Format", { exact: true }).inputValue(),
    "",
    "no format is preselected",
  );
  assert.equal(await button(dialog, "Import").isDisabled(), true, "nothing is imported without a format");
  await dialog.getByLabel("Format", { exact: true }).selectOption("raw");
  assert.equal(await command(dialog), `spillway image import ${image} ${file} --format raw`);
  await carryOut(dialog, "Import");
  await page.getByRole("heading", { name: image, level: 1 }).waitFor();
  await operation(page, `import ${image}:1`).getByText("done").waitFor({ timeout: DONE_MS });
  await versionRow(page, 1).getByText("published").waitFor();

  await button(page, "Import a file").click();
  dialog = await dialogOf(page, `Import a version of ${image}`);
  await dialog.getByText("It becomes version 2").waitFor();
  await dialog.getByLabel("File", { exact: true }).fill(file);
  await dialog.getByLabel("Format", { exact: true }).selectOption("raw");
  await carryOut(dialog, "Import");
  await operation(page, `import ${image}:2`).getByText("done").waitFor({ timeout: DONE_MS });
  await versionRow(page, 2).getByText("copied, whole").waitFor();
  assert.equal(
    await versionRow(page, 2).getByText("published").count(),
    0,
    "a later version is not published",
  );
  await context.close();
});

test("a version is looked at, checked, verified, tagged and published", needs, async () => {
  const { context, page } = await open(browser);
  await go(page, `#/images/${image}`);
  await page.getByRole("link", { name: "Version 2" }).click();
  await page.getByRole("heading", { name: `Check of ${image}:2` }).waitFor();
  assert.match(page.url(), /version=2/);
  await page.getByText("the disk has no boot loader").waitFor({ timeout: DONE_MS });
  await page.getByText("no program for UEFI").waitFor();

  await button(page, "Verify").click();
  let dialog = await dialogOf(page, `Verify ${image}:2?`);
  await carryOut(dialog, "Verify");
  await operation(page, `verify ${image}:2`).getByText("done").waitFor({ timeout: DONE_MS });
  await page.getByRole("link", { name: "Version 2" }).click();

  await button(page, "Tag").click();
  dialog = await dialogOf(page, `Tag ${image}:2`);
  await dialog.getByLabel("Tag", { exact: true }).fill("Last!");
  await dialog.getByText("A name has 1 to 63 letters").waitFor();
  await dialog.getByLabel("Tag", { exact: true }).fill("last-good");
  assert.equal(await command(dialog), `spillway image tag ${image}:2 last-good`);
  await carryOut(dialog, "Tag");
  await versionRow(page, 2).getByText("last-good").waitFor();
  await page.getByText("It is tagged last-good: remove the tag first.").waitFor();

  await button(page, "Publish").click();
  dialog = await dialogOf(page, `Publish ${image}:2?`);
  await dialog.getByText("No catalog follows the image").waitFor();
  await carryOut(dialog, "Publish");
  await versionRow(page, 2).getByText("published").waitFor();
  await page.getByText("It is published: publish another version first.").waitFor();

  await button(page, "Remove the tag last-good").click();
  dialog = await dialogOf(page, "Remove the tag last-good?");
  await carryOut(dialog, "Remove");
  await versionRow(page, 2).getByText("last-good").waitFor({ state: "detached" });
  await context.close();
});

test("what a catalog uses is not offered to be deleted", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/images/golden");
  await page.getByText(/^\d+ catalogs? uses? it: .*desk/).waitFor();
  assert.equal(await button(page, "Delete the image").count(), 0);
  assert.equal(await button(page, "Publish").count(), 0);
  await context.close();
});

test("a registry in a folder: added, pushed to, looked into, streamed from, removed", needs, async () => {
  mkdirSync(join(folder, hub), { recursive: true });
  const { context, page } = await open(browser, {}, { expected: DELETED });
  await go(page, "#/stores");
  await button(page, "Add a registry").click();
  let dialog = await dialogOf(page, "Add a registry");
  await dialog.getByLabel("Name", { exact: true }).fill(hub);
  await dialog.getByLabel("Address", { exact: true }).fill("https://me:secret@example.org/images");
  await dialog.getByText("An address has no user and password").waitFor();
  assert.equal(await command(dialog), `spillway registry add ${hub} URL`, "a password is not repeated");
  assert.equal(await button(dialog, "Add").isDisabled(), true, "and not sent");
  await dialog.getByLabel("Address", { exact: true }).fill(`file://${folder}/${hub}`);
  await carryOut(dialog, "Add");
  await button(page, `Check ${hub}`).click();
  await page.getByText("There is no version in it.").waitFor({ timeout: DONE_MS });

  await go(page, `#/images/${image}?version=2`);
  await button(page, "Push").click();
  dialog = await dialogOf(page, `Push ${image}:2`);
  await dialog.getByLabel("Registry").selectOption(hub);
  assert.equal(await command(dialog), `spillway image push ${image}:2 ${hub}`);
  await carryOut(dialog, "Push");
  await operation(page, `push ${image}:2 to ${hub}`)
    .getByText(/ sent \(/)
    .waitFor({ timeout: DONE_MS });

  await go(page, "#/stores");
  await button(page, `Check ${hub}`).click();
  await button(page, `Pull ${image}:2`).click({ timeout: DONE_MS });
  dialog = await dialogOf(page, `Pull ${hub}/${image}:2`);
  assert.equal(await command(dialog), `spillway image pull ${hub}/${image}:2`);
  await dialog.getByLabel("Name here").fill(`${image}-s`);
  await dialog.getByLabel("How much comes").selectOption("lazy");
  assert.equal(
    await command(dialog),
    `spillway image import ${image}-s --from ${hub}/${image}:2 --residency lazy`,
  );
  await carryOut(dialog, "Pull");
  await page.getByRole("heading", { name: `${image}-s`, level: 1 }).waitFor();
  await versionRow(page, 2).getByText("streamed (lazy)").waitFor({ timeout: DONE_MS });
  await page.getByText("It is streamed: only a version that was copied").first().waitFor();
  await button(page, "Fetch all").click();
  dialog = await dialogOf(page, `Fetch all of ${image}-s:2?`);
  await carryOut(dialog, "Fetch");
  await versionRow(page, 2).getByText("streamed (full), complete").waitFor({ timeout: DONE_MS });

  await go(page, "#/stores");
  await page.getByText(`It cannot be removed: ${image}-s:2 is streamed from it.`).waitFor();
  await go(page, `#/images/${image}-s`);
  await button(page, "Delete").click();
  dialog = await dialogOf(page, `Delete ${image}-s:2?`);
  await dialog.getByText("can be pulled again").waitFor();
  await carryOut(dialog, "Delete");
  await page.getByRole("heading", { name: "Images", level: 1 }).waitFor();

  await go(page, "#/stores");
  await button(page, `Check ${hub}`).click();
  const gone = button(page, `Delete there: ${image}:2`);
  await gone.waitFor({ timeout: DONE_MS });
  assert.deepEqual(await axe(page), [], "what a registry has");
  await gone.click();
  dialog = await dialogOf(page, `Delete ${image}:2 in ${hub}?`);
  assert.equal(await button(dialog, "Delete there").isDisabled(), true, "its name has to be typed");
  await dialog.getByRole("textbox").fill(`${hub}/${image}:2`);
  await carryOut(dialog, "Delete there");
  await page.getByText("There is no version in it.").waitFor({ timeout: DONE_MS });
  await button(page, `Count garbage in ${hub}`).click();
  dialog = await dialogOf(page, `Count the garbage in ${hub}?`);
  await carryOut(dialog, "Count");
  await page.getByRole("heading", { name: "Operations", level: 1 }).waitFor();
  await page
    .getByText(/Garbage: 0 chunks/)
    .first()
    .waitFor({ timeout: DONE_MS });

  await go(page, "#/stores");
  const item = page.getByRole("listitem").filter({ hasText: `file://${folder}/${hub}` });
  await button(item, `Collect garbage in ${hub}`).click();
  dialog = await dialogOf(page, `Collect the garbage in ${hub}?`);
  await button(dialog, "Cancel").click();
  await button(item, `Remove ${hub}`).click();
  dialog = await dialogOf(page, `Remove ${hub} from this host?`);
  await carryOut(dialog, "Remove");
  await item.waitFor({ state: "detached" });
  await context.close();
});

/** A request of the page, to prepare what a test is about. */
const ask = (page, method, path, body) =>
  page.evaluate(
    async ([method, path, body]) => {
      const json = { "Content-Type": "application/json" };
      const reply = await fetch(new URL(`..${path}`, document.baseURI), {
        method,
        ...(body ? { headers: json, body: JSON.stringify(body) } : {}),
      });
      if (!reply.ok) throw new Error(`${method} ${path}: ${await reply.text()}`);
    },
    [method, path, body],
  );

test("a machine's disk becomes a version; what the machine leaves is deleted", needs, async () => {
  const { context, page } = await open(browser);
  await go(page, `#/images/${image}`);
  const keep = `${image}-keep`;
  const spec = { image, count: 1, type: "dedicated" };
  await ask(page, "POST", "/v1/catalogs", { name: keep, spec });
  await ask(page, "POST", "/v1/machine-actions?wait=30", { action: "start", select: { catalog: keep } });
  await go(page, "#/images");
  await go(page, `#/images/${image}`);
  await button(page, "Commit a machine's disk").click();
  const title = `Make a version of ${image} from a machine's disk`;
  let dialog = await dialogOf(page, title);
  await dialog.getByLabel("Machine", { exact: true }).selectOption(`${keep}-001`);
  await dialog.getByText("is not off: stop it first.").waitFor();
  assert.equal(await button(dialog, "Make the version").isDisabled(), true);
  await page.keyboard.press("Escape");
  await ask(page, "POST", "/v1/machine-actions?wait=30", { action: "stop", select: { catalog: keep } });
  await button(page, "Commit a machine's disk").click();
  dialog = await dialogOf(page, title);
  await dialog.getByLabel("Machine", { exact: true }).selectOption(`${keep}-001`);
  assert.equal(await command(dialog), `spillway image commit ${keep}-001 --name ${image}`);
  await carryOut(dialog, "Make the version");
  await operation(page, `commit ${keep}-001 as ${image}:3`).getByText("done").waitFor({ timeout: DONE_MS });
  await versionRow(page, 3).waitFor();

  await ask(page, "DELETE", `/v1/catalogs/${keep}`);
  await go(page, "#/stores");
  const left = page.getByRole("table", { name: "Leftovers" }).getByRole("row").filter({ hasText: keep });
  await button(left.first(), "Delete").click({ timeout: DONE_MS });
  dialog = await dialogOf(page, `Delete what ${keep}-001 left?`);
  await dialog.getByText("is gone for good").waitFor();
  await dialog.getByRole("textbox").fill(`${keep}-001`);
  await carryOut(dialog, "Delete");
  await left.first().waitFor({ state: "detached" });
  await context.close();
});

test("a version and an image are deleted when their names are typed", needs, async () => {
  const { context, page } = await open(browser, {}, { expected: DELETED });
  await go(page, `#/images/${image}?version=1`);
  await button(page, "Delete").click();
  let dialog = await dialogOf(page, `Delete ${image}:1?`);
  await dialog.getByText("there is no other copy").waitFor();
  assert.equal(await button(dialog, "Delete").isDisabled(), true);
  await dialog.getByRole("textbox").fill(`${image}:1`);
  await carryOut(dialog, "Delete");
  await versionRow(page, 1).waitFor({ state: "detached" });
  await button(page, "Delete the image").click();
  dialog = await dialogOf(page, `Delete the image ${image}?`);
  await dialog.getByRole("textbox").fill(image);
  await carryOut(dialog, "Delete");
  await page.getByRole("heading", { name: "Images", level: 1 }).waitFor();
  await settled(page);
  assert.equal(await page.getByRole("link", { name: image }).count(), 0);
  await context.close();
});

test("forms of stores and downloads say what is wrong, and change nothing", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/stores");
  await button(page, "Add a store").click();
  let dialog = await dialogOf(page, "Add a store");
  await dialog.getByLabel("Folder").fill("srv");
  await dialog.getByText("It is an absolute path.").waitFor();
  assert.equal(await button(dialog, "Add").isDisabled(), true);
  await page.keyboard.press("Escape");
  await go(page, "#/images");
  await button(page, "Download").click();
  dialog = await dialogOf(page, "Download an image");
  await dialog.getByLabel("Address").fill("https://me:secret@example.org/a.img");
  await dialog.getByText("An address has no user and password").waitFor();
  assert.equal(await command(dialog), "spillway image import NAME URL --format FORMAT");
  await page.keyboard.press("Escape");
  await context.close();
});

/**
 * Begins a download that does not end: three quarters of a disk come, and then nothing, until the server is closed.
 */
async function beginDownload(page, name) {
  const server = createServer((_, answer) => {
    answer.writeHead(200, { "Content-Length": 64 << 20 });
    answer.write(Buffer.alloc(48 << 20));
  });
  server.listen(Number(port), "127.0.0.1");
  await once(server, "listening");
  const url = `http://127.0.0.1:${port}/disk.raw`;
  await ask(page, "POST", `/v1/images/${name}/downloads`, { url, format: "raw" });
  return {
    what: `import ${name}:1 from ${url}`,
    end: () => {
      server.closeAllConnections();
      server.close();
    },
  };
}

test("an operation that runs is first, with its progress, and can be cancelled", needs, async () => {
  const { context, page } = await open(browser);
  await go(page, "#/operations");
  const download = await beginDownload(page, `${image}-d`);
  const rows = page.getByRole("table", { name: "Operations" }).locator("tbody tr");
  const row = rows.filter({ hasText: download.what });
  await row.getByText(/^[1-9]\d?%$/).waitFor({ timeout: DONE_MS });
  assert.ok((await rows.nth(0).innerText()).startsWith(download.what), "what runs is first");
  assert.deepEqual(await axeInThemes(page), []);
  await row.getByRole("button", { name: "Cancel" }).click();
  const dialog = await dialogOf(page, "Cancel this operation?");
  assert.match(await command(dialog), /^spillway operation cancel \d+$/);
  await carryOut(dialog, "Cancel it");
  await row.getByText("cancelled").waitFor({ timeout: DONE_MS });
  assert.equal(await row.getByRole("button").count(), 0);
  download.end();
  await context.close();
});

test("a store that cannot be read is said to be so, until it can be", needs, async () => {
  const { context, page } = await open(browser);
  const path = join(folder, `nas-${unique}`);
  mkdirSync(path, { recursive: true });
  await go(page, "#/stores");
  await ask(page, "POST", "/v1/stores", { name: `nas-${unique}`, path, class: "shared" });
  renameSync(path, `${path}-away`);
  await go(page, "#/images");
  await go(page, "#/stores");
  await page.getByText("not measured").waitFor({ timeout: DONE_MS });
  await page.getByText("is its file system mounted?").waitFor();
  assert.deepEqual(await axe(page), []);
  renameSync(`${path}-away`, path);
  await page.getByText("not measured").waitFor({ state: "detached", timeout: DONE_MS });
  await context.close();
});

test("who may only look has no act on these pages, and is told why", {
  skip: process.env.SPILLWAY_CONSOLE_TOKEN ? needs.skip : "the address needs no token",
}, async () => {
  const admin = await open(browser);
  await go(admin.page, "#/operations");
  const download = await beginDownload(admin.page, `${image}-r`);
  const { context, page } = await open(browser, {}, { fresh: true });
  await page.goto(base);
  await signIn(page, "read");
  for (const hash of ["#/images", "#/images/golden", "#/stores", "#/operations"]) {
    await go(page, hash);
    await page.getByText("Your role is read.").waitFor();
    const names = await page.locator("main button:not(.sort)").allInnerTexts();
    assert.deepEqual(names, [], hash);
  }
  const row = page.getByRole("row").filter({ hasText: download.what });
  await row.getByText("running").waitFor();
  await context.close();
  const own = admin.page.getByRole("row").filter({ hasText: download.what });
  await own.getByRole("button", { name: "Cancel" }).click();
  await carryOut(admin.page.getByRole("dialog"), "Cancel it");
  await own.getByText("cancelled").waitFor({ timeout: DONE_MS });
  download.end();
  await admin.context.close();
});

/** A qcow2 image whose only cluster is compressed, and damaged. */
function damagedImage() {
  const cluster = 1 << 16;
  const disk = Buffer.alloc(6 * cluster);
  disk.write("QFI\xfb", "latin1");
  // Version, bits of a cluster, entries of the L1 table, clusters of the refcount table, bits of a refcount, length of the header.
  const small = { 4: 3, 20: 16, 36: 1, 56: 1, 96: 4, 100: 104 };
  for (const [at, n] of Object.entries(small)) disk.writeUInt32BE(n, Number(at));
  const place = (n) => BigInt(n * cluster);
  // Size of the disk, L1 table, refcount table; then what is in the tables.
  const large = [
    [24, 1n << 20n],
    [40, place(1)],
    [48, place(4)],
    [cluster, (1n << 63n) | place(2)],
    [2 * cluster, (1n << 62n) | (127n << 54n) | place(3)],
    [4 * cluster, place(5)],
  ];
  for (const [at, n] of large) disk.writeBigUInt64BE(n, at);
  disk.fill(0x5a, 3 * cluster, 4 * cluster);
  for (let i = 0; i < 6; i++) disk.writeUInt16BE(1, 5 * cluster + 2 * i);
  return disk;
}

test("long names and paths do not widen a narrow screen", needs, async () => {
  const { context, page } = await open(browser, { viewport: { width: 390, height: 844 } });
  await go(page, "#/operations");
  const name = `${image}-`.padEnd(63, "n");
  const path = join(folder, `${"folder".repeat(30)}${unique}`);
  copyFileSync(file, path);
  await ask(page, "POST", `/v1/images/${name}/versions?wait=30`, { path, format: "raw" });
  await ask(page, "PUT", `/v1/images/${name}/tags/${"t".repeat(63)}`, { version: 1 });
  writeFileSync(path, damagedImage());
  await ask(page, "POST", `/v1/images/${name}/versions`, { path, format: "qcow2" });
  const catalog = "c".repeat(63);
  await ask(page, "POST", "/v1/catalogs", {
    name: catalog,
    spec: { image: name, count: 1, naming: "long-#" },
  });
  const pages = ["#/operations", `#/images/${name}`, "#/images", "#/stores", "#/machines/long-1"];
  const tabs = ["", "?tab=versions", "?tab=settings"].map((tab) => `#/catalogs/${catalog}${tab}`);
  for (const hash of [...pages, ...tabs, "#/machines", "#/catalogs"]) {
    await go(page, hash);
    if (hash === "#/operations" || hash.endsWith(`/${name}`))
      await page.getByText(`${path}: not imported as qcow2: it is cut off or damaged`).waitFor();
    if (hash.endsWith(`/${name}`)) await page.getByText("t".repeat(63)).first().waitFor();
    // What the daemon says of an update comes later than the page.
    if (hash.endsWith("tab=versions")) await page.getByText("Each takes").waitFor();
    assert.ok((await excess(page)) <= 0, hash);
    assert.deepEqual(await axeInThemes(page), [], hash);
  }
  await ask(page, "DELETE", `/v1/catalogs/${catalog}`);
  await context.close();
});
