// Each page opens, in both themes and on a narrow screen: nothing on it breaks the policy, asks a foreign server, is wider
// than the screen, or is an obstacle by the rules of axe.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { axe, axeInThemes, excess, go, launch, objects, open, pagesOf, settled, shot } from "./lib.mjs";

let browser;
let names;

before(async () => {
  browser = await launch();
  const { context, page } = await open(browser);
  await go(page, "#/");
  names = await objects(page);
  await context.close();
});
after(() => browser?.close());

for (const [what, options] of [
  ["light", { colorScheme: "light" }],
  ["dark", { colorScheme: "dark" }],
  ["narrow", { colorScheme: "light", viewport: { width: 390, height: 844 }, reducedMotion: "reduce" }],
]) {
  test(`each page opens: ${what}`, async () => {
    const { context, page } = await open(browser, options);
    const wrong = [];
    for (const hash of pagesOf(names)) {
      await go(page, hash);
      await page.waitForTimeout(150);
      await settled(page);
      assert.equal(await page.locator("h1").count(), 1, `${hash}: one h1`);
      assert.equal(await page.locator("main").count(), 1, `${hash}: one main`);
      const width = await excess(page);
      if (width > 0) wrong.push(`${hash}: ${width} pixels wider than the screen`);
      if (what === "light")
        await shot(page, `page-${hash.replace(/[^a-z0-9]+/gi, "-").replace(/^-|-$/g, "") || "host"}`);
      for (const violation of await axe(page)) wrong.push(`${hash}: ${violation}`);
    }
    assert.deepEqual(wrong, []);
    await context.close();
  });
}

/** The folder of a report that `spillway lab report` has made. */
const report = process.env.SPILLWAY_REPORT;
test("a report of the lab is opened in place, and has no rights", {
  skip: report ? false : "SPILLWAY_REPORT is not set",
}, async () => {
  const { context, page, seen } = await open(browser);
  await go(page, "#/reports");
  assert.deepEqual(await axeInThemes(page), []);
  const answer = page.waitForResponse((response) => response.url().endsWith(`/${report}/report.html`));
  await page.getByRole("link", { name: report }).click();
  const headers = await (await answer).allHeaders();
  assert.match(headers["content-security-policy"], /^sandbox; default-src 'none'/);
  const frame = page.frameLocator("iframe.report");
  await frame.getByRole("heading", { level: 1 }).waitFor();
  assert.ok((await frame.locator("svg").count()) > 0, "its pictures are in it");
  assert.equal(await page.locator("iframe.report").getAttribute("sandbox"), "");
  const asked = seen.requests.length;
  for (const width of [1280, 390]) {
    await page.setViewportSize({ width, height: 900 });
    // What is in the frame has no scripts, so that axe looks at the page around it.
    assert.deepEqual(await axeInThemes(page), [], `${width} pixels`);
    assert.ok((await excess(page)) <= 0, `${width} pixels`);
  }
  const more = seen.requests.slice(asked).filter((url) => !url.includes("/v1/"));
  assert.deepEqual(more, [], "a report asks for nothing");
  await shot(page, "report");
  await context.close();
});
