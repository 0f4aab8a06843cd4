// How pages behave: with the keyboard, in the URL, while the daemon is away, and without a session.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { assertClean, axe, axeInThemes, base, go, launch, objects, open, spillway } from "./lib.mjs";

let browser;
before(async () => {
  browser = await launch();
});
after(() => browser?.close());

test("a change of page moves the focus to its title, and says it", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/");
  await page.getByRole("navigation", { name: "Main" }).getByRole("link", { name: "Machines" }).focus();
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.activeElement?.id === "page-title");
  assert.equal(await page.locator("h1").textContent(), "Machines");
  assert.equal(await page.title(), "Machines - Spillway");
  assert.equal(await page.locator("[role=status]").textContent(), "Machines");
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
  const { context, page } = await open(browser);
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
  assert.deepEqual(await axeInThemes(page), []);
  await page.keyboard.press("Escape");
  await dialog.waitFor({ state: "detached" });
  assert.equal(
    await reset.evaluate((button) => button === document.activeElement),
    true,
    "the focus returns",
  );
  assert.deepEqual(changes, []);
  await context.close();
});

test("the focus is not lost when a browser closes a dialog by itself, and what it would go back to is gone", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/stores");
  const add = page.getByRole("button", { name: "Add a store" });
  await add.focus();
  await page.keyboard.press("Enter");
  const dialog = page.getByRole("dialog");
  await dialog.waitFor();
  await add.evaluate((button) => {
    button.disabled = true;
  });
  // Chromium asks the page before (cancel), also when it does not heed the answer. Other browsers may not.
  await dialog.evaluate((element) => element.close());
  await dialog.waitFor({ state: "detached" });
  await page.waitForFunction(() => document.activeElement?.id === "page-title");
  await context.close();
});

test("a row that has the focus keeps its place while another window is used", async () => {
  const windows = await launch({ isWhole: true });
  const { context, page } = await open(windows);
  await go(page, "#/machines?filter=desk-&sort=state");
  const names = () => page.locator("tbody th").allInnerTexts();
  const [first, ...others] = await names();
  assert.ok(others.length, first);
  const row = page.getByRole("row", { name: first });
  await row.getByRole("link", { name: first }).focus();
  // Playwright lets each page believe that its window has the focus.
  const cdp = await context.newCDPSession(page);
  await cdp.send("Emulation.setFocusEmulationEnabled", { enabled: false });
  const other = await context.newPage();
  await other.bringToFront();
  await page.waitForFunction(() => !document.hasFocus());
  spillway("machine", "stop", first, "--wait");
  try {
    await row.getByText("stopped").waitFor();
    assert.deepEqual(await names(), [first, ...others]);
    await page.bringToFront();
    await page.waitForFunction(() => document.hasFocus());
    assert.deepEqual(await names(), [first, ...others]);
    await page.getByRole("searchbox").focus();
    await page.waitForFunction((first) => document.querySelector("tbody th").innerText !== first, first);
    assert.deepEqual(await names(), [...others, first], "and lets it go with the focus");
    await context.close();
  } finally {
    await windows.close();
    spillway("machine", "start", first, "--wait");
  }
});

test("a catalog is made and deleted with the keyboard alone", async () => {
  const { context, page } = await open(browser, {}, { expected: /status of 404 .*by-hand/ });
  await go(page, "#/");
  /** Presses Tab until a control has the focus, as somebody without a mouse does. */
  const reach = async (control) => {
    await control.waitFor();
    for (let i = 0; i < 120; i++) {
      if (await control.evaluate((element) => element === document.activeElement)) return;
      await page.keyboard.press("Tab");
    }
    assert.fail(`no Tab leads to ${control}`);
  };
  const press = async (control, key = "Enter") => {
    await reach(control);
    await page.keyboard.press(key);
  };
  const type = async (control, text) => {
    await reach(control);
    await page.keyboard.type(text);
  };
  await press(page.getByRole("navigation", { name: "Main" }).getByRole("link", { name: "Catalogs" }));
  await press(page.getByRole("link", { name: "New catalog" }));
  await type(page.getByLabel("Name", { exact: true }), "by-hand");
  await type(page.getByLabel("Image", { exact: true }), "golden");
  await page.getByText("The daemon accepts these settings.").waitFor();
  await press(page.getByRole("link", { name: "Continue" }));
  await type(page.getByRole("textbox", { name: "Machines", exact: true }), "2");
  await press(page.getByRole("link", { name: "Continue" }));
  await type(page.getByRole("textbox", { name: "RAM tier" }), "8M");
  await press(page.getByRole("link", { name: "Continue" }));
  // It is the same link in each step, and leads on once the next one is there.
  await page.getByLabel("User data for cloud-init").waitFor();
  await press(page.getByRole("link", { name: "Continue" }));
  await press(page.getByRole("button", { name: "Create the catalog" }), "Space");
  await page.getByRole("heading", { name: "by-hand", level: 1 }).waitFor();
  await page.getByRole("row", { name: /by-hand-002/ }).waitFor();
  await press(page.getByRole("button", { name: "Delete", exact: true }), "Space");
  const dialog = page.getByRole("dialog");
  await type(dialog.getByRole("textbox"), "by-hand");
  await press(dialog.getByRole("button", { name: "Delete", exact: true }));
  await page.getByRole("heading", { name: "Catalogs", level: 1 }).waitFor();
  // The catalog's page may have asked once more, before it was left.
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
  const { context, page, seen } = await open(browser, {}, { expected: /status of 401 / });
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

test("charts show what the daemon remembers", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/catalogs");
  const { catalog } = await objects(page);
  // The daemon takes a row each ten seconds.
  await page.waitForFunction(
    async (catalog) => {
      const { series } = await (await fetch(`/v1/history?catalog=${catalog}`)).json();
      return series.find(({ name }) => name === "fill").values.some((value) => value !== null);
    },
    catalog,
    { timeout: 40_000, polling: 1000 },
  );
  await go(page, `#/catalogs/${catalog}?tab=figures`);
  await page.waitForSelector("canvas");
  await page.getByText("Fill of the fullest machine").waitFor();
  const asked = page.waitForResponse((answer) => answer.url().includes("seconds=21600"));
  await page.getByLabel("The last").selectOption("21600");
  assert.equal((await asked).status(), 200);
  assert.match(page.url(), /seconds=21600/);
  await context.close();
});

test("changes of settings stay when somebody goes elsewhere, and the browser asks before they are lost", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/");
  const { catalog } = await objects(page);
  await go(page, `#/catalogs/${catalog}?tab=settings`);
  const field = page.getByRole("textbox", { name: "Duration of claims, s" });
  const before = await field.inputValue();
  await field.fill("4711");
  await page.getByText("1 setting changed").waitFor();
  await page.getByRole("navigation", { name: "Main" }).getByRole("link", { name: "Machines" }).click();
  await page.getByText("kept in Settings").waitFor();
  await page.goBack();
  assert.equal(await field.inputValue(), "4711");
  let asked = "";
  page.once("dialog", (dialog) => {
    asked = dialog.type();
    void dialog.dismiss();
  });
  await page.evaluate(() => location.reload());
  await page.waitForTimeout(500);
  assert.equal(asked, "beforeunload");
  assert.equal(await field.inputValue(), "4711");
  await page.getByRole("button", { name: "Discard" }).click();
  assert.equal(await field.inputValue(), before);
  assert.equal(await page.evaluate(() => document.activeElement?.id), "page-title", "the focus is not lost");
  await context.close();
});

test("the number of a batch can be emptied while it is typed, and is no number then", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/");
  const { catalog } = await objects(page);
  await go(page, `#/catalogs/${catalog}?tab=versions`);
  await page.getByRole("combobox", { name: "When machines take it" }).selectOption("batch");
  const update = page.getByRole("button", { name: "Update", exact: true });
  const field = page.getByRole("textbox", { name: "Restarted at the same time" });
  await update.and(page.locator(":enabled")).waitFor();
  await field.press("End");
  await page.keyboard.press("Backspace");
  assert.equal(await field.inputValue(), "");
  await page.getByText("It is a whole number.").waitFor();
  await update.and(page.locator(":disabled")).waitFor();
  assert.deepEqual(await axeInThemes(page), []);
  await page.keyboard.type("5");
  assert.equal(await field.inputValue(), "5");
  await update.and(page.locator(":enabled")).click();
  assert.match(await page.getByRole("dialog").locator("pre").innerText(), /--rollout batch=5$/);
  await page.keyboard.press("Escape");
  await context.close();
});

test("an answer that is lost can be asked for again", async () => {
  const { context, page } = await open(browser, {}, { expected: /ERR_FAILED .*\/v1\/catalogs$/ });
  await go(page, "#/catalogs/new");
  const { image } = await objects(page);
  await page.getByLabel("Name", { exact: true }).fill("asked-twice");
  await page.getByLabel("Image", { exact: true }).selectOption(image);
  await page.getByRole("link", { name: "Review" }).click();
  await page.getByText("256M (default)").waitFor();
  const keys = [];
  await page.route("**/v1/catalogs", async (route) => {
    if (route.request().method() !== "POST") return route.continue();
    keys.push(route.request().headers()["idempotency-key"]);
    if (keys.length > 1) return route.continue();
    // The daemon makes it, and nobody is told.
    await route.fetch();
    return route.abort();
  });
  const create = page.getByRole("button", { name: "Create the catalog" });
  await create.click();
  await page.getByText("The daemon does not answer.").first().waitFor();
  await page.waitForFunction(() => document.activeElement?.textContent === "Create the catalog");
  await create.click();
  await page.getByRole("heading", { name: "asked-twice", level: 1 }).waitFor();
  assert.ok(keys.length === 2 && keys[0] && keys[0] === keys[1], keys.join());
  await page.getByRole("button", { name: "Delete" }).click();
  await page.getByLabel("Type asked-twice to confirm").fill("asked-twice");
  await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
  await page.getByRole("heading", { name: "Catalogs", level: 1 }).waitFor();
  await context.close();
});

test("what is typed into a dialog stays as it is typed", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/catalogs/desk");
  await page.getByRole("button", { name: "Claim one" }).click();
  const owner = page.getByRole("dialog").getByLabel("Owner");
  await owner.pressSequentially(" Ann Lee");
  assert.equal(await owner.inputValue(), " Ann Lee");
  await page.getByRole("dialog").getByText("claim desk --owner 'Ann Lee'").waitFor();
  await page.keyboard.press("Escape");
  await context.close();
});

test("where the guest has written says how old it is", async () => {
  const { context, page } = await open(browser);
  await go(page, "#/");
  const { machine } = await objects(page);
  await go(page, `#/machines/${machine}`);
  const panel = page.getByRole("region", { name: "Written most" });
  for (const age of [/, read (now|[1-9] s ago)$/m, /, read ([3-9]|1[0-9]) s ago$/m]) await panel.getByText(age).waitFor();
  const nothing = panel.getByText("nothing had been written since the last reset");
  const inside = await nothing.evaluate((text) => Number.parseFloat(getComputedStyle(text).paddingLeft));
  assert.ok(inside >= 8, `${inside} px`);
  await context.close();
});

test("charts that could not be loaded are loaded again by a button", async () => {
  const { context, page } = await open(browser, {}, { expected: /ERR_FAILED .*\/chart\.js$/ });
  await go(page, "#/");
  const { catalog, machine } = await objects(page);
  await page.route("**/chart.js", (route) => route.abort());
  await go(page, `#/catalogs/${catalog}?tab=figures`);
  await page.getByRole("button", { name: "Try again" }).first().click();
  await page.waitForSelector("canvas");
  await go(page, `#/machines/${machine}?tab=figures&seconds=86400`);
  const spans = page.getByLabel("The last").locator("option");
  assert.deepEqual(await spans.allInnerTexts(), ["hour", "15 minutes"], "a day of machines is not kept");
  assert.doesNotMatch(page.url(), /seconds/);
  await context.close();
});
