// Each page opens, in both themes and on a narrow screen: nothing on it breaks the policy, asks a foreign server, is wider
// than the screen, or is an obstacle by the rules of axe.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { axe, go, launch, objects, open, pagesOf, settled, shot } from "./lib.mjs";

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
      const width = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      if (width > 0) wrong.push(`${hash}: ${width} pixels wider than the screen`);
      if (what === "light")
        await shot(page, `page-${hash.replace(/[^a-z0-9]+/gi, "-").replace(/^-|-$/g, "") || "host"}`);
      for (const violation of await axe(page)) wrong.push(`${hash}: ${violation}`);
    }
    assert.deepEqual(wrong, []);
    await context.close();
  });
}
