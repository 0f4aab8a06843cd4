// How pages behave: with the keyboard, in the URL, while the daemon is away, and without a session.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { assertClean, axe, base, go, launch, objects, open } from "./lib.mjs";

let browser;
before(async () => {
  browser = await launch();
});
after(() => browser?.close());

test("a change of page moves the focus to its title, and says it", async () => {
  const { context, page, seen } = await open(browser);
  await go(page, "#/");
  await page.getByRole("navigation", { name: "Main" }).getByRole("link", { name: "Machines" }).focus();
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.activeElement?.id === "page-title");
  assert.equal(await page.locator("h1").textContent(), "Machines");
  assert.equal(await page.title(), "Machines - Spillway");
  assert.equal(await page.locator("[role=status]").textContent(), "Machines");
  assertClean(seen);
  await context.close();
});

test("the URL has the filter and the sort, and a link shows the same", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/machines");
  const { machine } = await objects(page);
  await page.getByRole("searchbox").fill(machine);
  await page.getByRole("button", { name: "State" }).click();
  assert.match(page.url(), new RegExp(`filter=${machine}`));
  assert.match(page.url(), /sort=state/);
  const url = page.url();
  await page.goto("about:blank");
  await page.goto(url);
  await page.waitForSelector("tbody th");
  assert.equal(await page.getByRole("searchbox").inputValue(), machine);
  assert.match(await page.locator("th[aria-sort]").innerText(), /^State/);
  for (const name of await page.locator("tbody th").allInnerTexts()) assert.ok(name.includes(machine), name);
  await context.close();
});

test("an act names its consequences and its command, and Escape changes nothing", async () => {
  const { context, page, seen } = await open(browser);
  await go(page, "#/machines");
  const changes = [];
  page.on("request", (request) => {
    if (request.method() !== "GET") changes.push(request.url());
  });
  const { machine } = await objects(page);
  await page.getByRole("searchbox").fill(machine);
  await page.getByRole("checkbox", { name: `Select ${machine}` }).check();
  const reset = page.getByRole("region", { name: "Selection" }).getByRole("button", { name: "Reset" });
  await reset.focus();
  await page.keyboard.press("Enter");
  const dialog = page.getByRole("dialog");
  await dialog.waitFor();
  assert.match(await dialog.innerText(), /is gone/);
  assert.match(await dialog.locator("pre").innerText(), new RegExp(`spillway machine reset ${machine}`));
  assert.deepEqual(await axe(page), []);
  await page.keyboard.press("Escape");
  await dialog.waitFor({ state: "detached" });
  assert.equal(
    await reset.evaluate((button) => button === document.activeElement),
    true,
    "the focus returns",
  );
  assert.deepEqual(changes, []);
  assertClean(seen);
  await context.close();
});

test("the daemon goes and comes back, and the page needs no reload", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/catalogs");
  await page.waitForSelector("tbody th");
  const names = await page.locator("tbody th").allInnerTexts();
  await page.route("**/v1/**", (route) => route.abort());
  await page.getByText("The daemon has not answered since").waitFor({ timeout: 10_000 });
  assert.deepEqual(await page.locator("tbody th").allInnerTexts(), names, "what was there stays");
  await page.unroute("**/v1/**");
  await page.getByText("The daemon has not answered since").waitFor({ state: "detached", timeout: 10_000 });
  await page.getByText("Figures are live").waitFor({ timeout: 10_000 });
  await context.close();
});

test("a hidden page asks for nothing", async () => {
  const { context, page, seen } = await open(browser);
  await go(page, "#/catalogs");
  await page.evaluate(() => {
    Object.defineProperty(document, "visibilityState", { value: "hidden" });
    document.dispatchEvent(new Event("visibilitychange"));
  });
  await page.waitForTimeout(500);
  const asked = seen.requests.length;
  await page.waitForTimeout(5000);
  assert.deepEqual(seen.requests.slice(asked), []);
  await context.close();
});

const token = process.env.SPILLWAY_CONSOLE_TOKEN;
test("without a session there is the login, which leads to the page that was asked for", {
  skip: token ? false : "the address needs no token",
}, async () => {
  const { context, page, seen } = await open(browser);
  await page.goto(`${base}#/catalogs`);
  await page.waitForSelector("main.login");
  assert.deepEqual(await axe(page), []);
  await page.getByLabel("Token").fill("wrong");
  await page.keyboard.press("Enter");
  await page.getByText("this token is not known").waitFor();
  await page.getByLabel("Token").fill(token);
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: "Catalogs", level: 1 }).waitFor();
  const [cookie] = await context.cookies();
  assert.deepEqual(
    [cookie.name, cookie.httpOnly, cookie.secure, cookie.sameSite],
    ["__Host-spillway", true, true, "Strict"],
  );
  assertClean(seen);
  // Another tab has the same session; who logs out is out in both.
  const other = await context.newPage();
  await other.goto(`${base}#/machines`);
  await other.getByRole("heading", { name: "Machines", level: 1 }).waitFor();
  await other.getByRole("button", { name: "Sign out" }).click();
  await other.waitForSelector("main.login");
  await page.bringToFront();
  await page.waitForSelector("main.login", { timeout: 10_000 });
  await context.close();
});

test("charts show the history of the daemon", async () => {
  const { context, page, seen } = await open(browser);
  const asked = [];
  await page.route("**/v1/history?**", (route) => {
    const seconds = Number(new URL(route.request().url()).searchParams.get("seconds"));
    asked.push(seconds);
    const step = seconds > 3600 ? 60 : 10;
    const values = Array.from({ length: seconds / step }, (_, i) =>
      i % 50 === 7 ? null : 1e6 + 5e5 * Math.sin(i / 9),
    );
    const names = ["guest_written_bytes", "ram_written_bytes", "overflow_written_bytes", "ram_used_bytes"];
    return route.fulfill({
      json: {
        until: new Date().toISOString(),
        step_seconds: step,
        series: [
          ...names.map((name) => ({ name, values })),
          { name: "fill", values: values.map((v) => v && v / 2e6) },
        ],
      },
    });
  });
  await go(page, "#/");
  const { catalog } = await objects(page);
  await go(page, `#/catalogs/${catalog}?tab=figures`);
  await page.waitForSelector("canvas");
  await page.getByText("Fill of the fullest machine").waitFor();
  await page.getByLabel("The last").selectOption("21600");
  await page.waitForTimeout(800);
  assert.ok(asked.includes(3600) && asked.includes(21_600), asked.join());
  assert.match(page.url(), /seconds=21600/);
  if (process.env.SPILLWAY_SHOTS)
    await page.screenshot({ path: `${process.env.SPILLWAY_SHOTS}/history.png`, fullPage: true });
  assertClean(seen);
  await context.close();
});
