// How soon something is on the screen when the console is opened, with an empty cache each time.
import assert from "node:assert/strict";
import { base, launch, median, open, say } from "./lib.mjs";

/** From the start to the first paint. */
const FIRST_PAINT_MS = 300;

const browser = await launch({ isWhole: true });
try {
  const paints = [];
  for (let i = 0; i < 5; i++) {
    const { context, page } = await open(browser);
    await page.goto(base);
    await page.waitForSelector("h1");
    paints.push(
      await page.evaluate(
        () => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? Infinity,
      ),
    );
    await context.close();
  }
  say(`first paint: ${paints.map((ms) => Math.round(ms)).join(", ")} ms`);
  assert.ok(median(paints) <= FIRST_PAINT_MS, "first paint");
} finally {
  await browser.close();
}
