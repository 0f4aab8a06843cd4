// A browser for the end-to-end tests: it notes every request, every violation of the content security policy and every error
// of a page. Invariant: a page that breaks one of these rules fails the test that opened it.
//
// SPILLWAY_CONSOLE_URL     address of the console, such as http://127.0.0.1:9444/console/, or what `spillway console` prints (needed)
// SPILLWAY_CONSOLE_TOKEN   token for the login page, if the address shows one
// SPILLWAY_CHROMIUM        the browser; /usr/bin/chromium by default
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const require = createRequire(import.meta.url);
const axeSource = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

/** The address as it was given. That of `spillway console` has a key, which lets a browser in. */
const entry = process.env.SPILLWAY_CONSOLE_URL ?? "";
export const base = entry.replace(/[?#].*$/, "");
/** The cookies of a browser that was let in. */
let letIn;
const token = process.env.SPILLWAY_CONSOLE_TOKEN;
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
    ...(letIn ? { storageState: letIn } : {}),
    ...options,
  });
  const page = await context.newPage();
  if (entry.includes("?") && !letIn) {
    await page.goto(entry);
    letIn = await context.storageState();
    await page.goto("about:blank");
  }
  const seen = { requests: [], errors: [], violations: [] };
  page.on("request", (request) => seen.requests.push(request.url()));
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("console", (message) => {
    const text = message.text();
    if (/Content Security Policy/i.test(text)) seen.violations.push(text);
    // The browser reports each answer that is an error; the page handles it.
    else if (message.type() === "error" && !/Failed to load resource/.test(text)) seen.errors.push(text);
  });
  await page.addInitScript(() => {
    addEventListener("securitypolicyviolation", (e) =>
      console.error(`Content Security Policy: ${e.violatedDirective} ${e.blockedURI}`),
    );
  });
  return { context, page, seen };
}

/** Goes to a page of the console, and waits for what it shows. Signs in if it has to. */
export async function go(page, hash) {
  await page.goto(`${base}${hash}`, { waitUntil: "domcontentloaded" });
  await page.waitForSelector("h1");
  await settled(page);
  if (token && (await page.locator("main.login").count())) {
    await page.fill("input[name=token]", token);
    await page.click("button[type=submit]");
    await page.waitForSelector(".shell");
    await settled(page);
  }
}

/** Waits until nothing says that it is being loaded. */
export async function settled(page) {
  await page.waitForFunction(() => !document.querySelector(".loading"), null, { timeout: 20_000 });
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

/** Requests to others than the console's own server. */
export function foreign(seen) {
  const { origin } = new URL(base);
  return seen.requests.filter((url) => !url.startsWith(`${origin}/`) && !/^(data|blob|about):/.test(url));
}

/** Nothing went wrong on a page, and it asked nobody but its own server. */
export function assertClean(seen) {
  assert.deepEqual(
    { errors: seen.errors, violations: seen.violations, foreign: foreign(seen) },
    { errors: [], violations: [], foreign: [] },
  );
}

/** Names of objects that the host has. The tests need a catalog with a machine, and an image. */
export async function objects(page) {
  const names = await page.evaluate(async () => {
    const first = async (path) =>
      (await (await fetch(new URL(`..${path}`, document.baseURI))).json()).items?.[0]?.name;
    return {
      image: await first("/v1/images?limit=1"),
      catalog: await first("/v1/catalogs?limit=1"),
      machine: await first("/v1/machines?limit=1"),
    };
  });
  for (const [kind, name] of Object.entries(names))
    assert.ok(name, `the host has no ${kind}: the tests need one`);
  return names;
}
