// Pictures of pages, for people who work on the console: node e2e/shots.mjs OUT [HASH...]
import { mkdirSync } from "node:fs";
import { axe, go, launch, open } from "./lib.mjs";

const [out = ".shots", ...hashes] = process.argv.slice(2);
mkdirSync(out, { recursive: true });
const browser = await launch({ isWhole: true });
for (const [width, scheme] of [
  [1280, "light"],
  [1280, "dark"],
  [390, "light"],
]) {
  const { page, seen } = await open(browser, {
    viewport: { width, height: 900 },
    colorScheme: scheme,
    deviceScaleFactor: 1,
  });
  for (const hash of hashes.length ? hashes : ["#/"]) {
    await go(page, hash);
    await page.waitForTimeout(Number(process.env.WAIT ?? 4500));
    const name = hash.replace(/[^a-z0-9]+/gi, "-").replace(/^-|-$/g, "") || "host";
    await page.screenshot({
      path: `${out}/${name}-${width}-${scheme}.png`,
      fullPage: process.env.FULL !== "0",
    });
    const wrong = await axe(page);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
    console.log(`${width} ${scheme} ${hash}${wide ? " WIDER THAN THE SCREEN" : ""}`, wrong);
  }
  console.log(seen.errors, seen.violations);
}
await browser.close();
