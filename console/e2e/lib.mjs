// A browser for the end-to-end tests: it notes every request, every violation of the content security policy and every error
// of a page. Invariant: a page that breaks one of these rules fails the test that opened it.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const require = createRequire(import.meta.url);
const axeSource = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

/** Address of the console, such as `http://127.0.0.1:9444/console/`. */
export const base = (process.env.SPILLWAY_CONSOLE_URL ?? "").replace(/#.*$/, "");
const executablePath = process.env.SPILLWAY_CHROMIUM ?? "/usr/bin/chromium";

export async function launch() {
  if (!base) throw new Error("SPILLWAY_CONSOLE_URL is not set: give the address of the console");
  return chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
}

/** Opens a page and watches it. */
export async function open(browser, options = {}) {
  const context = await browser.newContext({
    viewport: { width: 1280, height: 900 },
    ignoreHTTPSErrors: true,
    ...options,
  });
  const page = await context.newPage();
  const seen = { requests: [], errors: [], violations: [] };
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("console", (message) => {
    const text = message.text();
    if (/Content Security Policy/i.test(text)) seen.violations.push(text);
    // A 404 of a route that an older daemon does not have is reported by the browser, and handled by the page.
    else if (message.type() === "error" && !/Failed to load resource/.test(text)) seen.errors.push(text);
  });
  await page.addInitScript(() => {
    addEventListener("securitypolicyviolation", (e) =>
      console.error(`Content Security Policy: ${e.violatedDirective} ${e.blockedURI}`),
    );
  });
  return { context, page, seen };
}

/** Goes to a page of the console, and waits for its title. */
export async function go(page, hash) {
  await page.goto(`${base}${hash}`, { waitUntil: "domcontentloaded" });
  await page.waitForSelector("h1");
  await page.waitForFunction(() => !document.querySelector(".loading"), null, { timeout: 15_000 });
}

/** What axe finds wrong, in a line each. axe is put in by the debugger, which the policy of the page does not concern. */
export async function axe(page) {
  await page.evaluate(axeSource);
  const results = await page.evaluate(() =>
    globalThis.axe.run(document, {
      runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    }),
  );
  return results.violations.map(
    (v) =>
      `${v.id}: ${v.help}: ${v.nodes
        .map((n) => n.target.join(" "))
        .slice(0, 4)
        .join(" | ")}`,
  );
}

export function foreign(seen) {
  const origin = new URL(base).origin;
  return seen.requests.filter(
    (url) => !url.startsWith(`${origin}/`) && !url.startsWith("data:") && !url.startsWith("blob:"),
  );
}
