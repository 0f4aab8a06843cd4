// A browser for the end-to-end tests: it notes every request, every violation of the content security policy and every error
// of a page. Invariant: a page that breaks one of these rules fails the test that opened it.
//
// SPILLWAY_CONSOLE_URL     address of the console, such as http://127.0.0.1:9444/console/, or what `spillway console` prints (needed)
// SPILLWAY_CONSOLE_TOKEN   token for the login page, if the address shows one
// SPILLWAY_CHROMIUM        the browser, whatever a test needs; Debian's by default
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { once } from "node:events";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

/** There is no session yet, or the host is in no fleet: the page asks for both, to know it. */
const NONE_YET = /status of (401 .*\/v1\/session|409 .*\/v1\/fleet)$/;
const require = createRequire(import.meta.url);
const axeSource = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

/** The address as it was given. That of `spillway console` has a key, which lets a browser in. */
const entry = process.env.SPILLWAY_CONSOLE_URL ?? "";
export const base = entry.replace(/[?#].*$/, "");
/** The cookies of a browser that was let in. */
let letIn;
const token = process.env.SPILLWAY_CONSOLE_TOKEN;
const whole = "/usr/bin/chromium";
/** The same without windows. It takes half of the processor time. */
const shell = "/usr/lib/chromium/chromium-headless-shell";

/** Starts a browser. With `isWhole` the one that people use: for tests of its windows, and of what a page costs. */
export async function launch({ args = [], isWhole = false } = {}) {
  if (!base) throw new Error("SPILLWAY_CONSOLE_URL is not set: give the address of the console");
  const executablePath = process.env.SPILLWAY_CHROMIUM ?? (isWhole || !existsSync(shell) ? whole : shell);
  return chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", ...args] });
}

/**
 * Opens a page and watches it: closing its context fails if it was not clean. With `fresh`, in a browser that nobody has let in. `at`
 * is the server that it may ask, and `expected` the errors that a test brings about.
 */
export async function open(browser, options = {}, { fresh = false, at = base, expected } = {}) {
  const context = await browser.newContext({
    viewport: { width: 1280, height: 900 },
    ignoreHTTPSErrors: true,
    ...(letIn && !fresh ? { storageState: letIn } : {}),
    ...options,
  });
  const page = await context.newPage();
  if (entry.includes("?") && !letIn && !fresh) {
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
    else if (message.type() === "error") seen.errors.push(`${text} ${message.location().url}`);
  });
  await page.addInitScript(() => {
    addEventListener("securitypolicyviolation", (e) =>
      console.error(`Content Security Policy: ${e.violatedDirective} ${e.blockedURI}`),
    );
  });
  const close = context.close.bind(context);
  context.close = async () => {
    assertClean(seen, at, expected);
    await close();
  };
  return { context, page, seen };
}

/** Goes to a page of the console, and waits for what it shows. Signs in if it has to. */
export async function go(page, hash, at = base) {
  await page.goto(`${at}${hash}`, { waitUntil: "domcontentloaded" });
  await page.waitForSelector("h1");
  await settled(page);
  if (token && (await page.locator("main.login").count())) await signIn(page, token);
}

/** Signs in at the login page. */
export async function signIn(page, token) {
  await page.getByLabel("Token").fill(token);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.waitForSelector(".shell");
  await settled(page);
}

/** Whether nothing can be seen of a page and its dialogs: then the picture is the same when their colours are others. */
export async function isCovered(page) {
  // Chromium may draw the same thing twice with a rounded corner of another shade; what is seen differs each time.
  for (let i = 0; i < 5; i++) {
    const before = await page.screenshot();
    await page.evaluate(() => {
      const sheet = new CSSStyleSheet();
      sheet.replaceSync(".shell, dialog.act { filter: invert(1) }");
      document.adoptedStyleSheets.push(sheet);
    });
    const after = await page.screenshot();
    await page.evaluate(() => document.adoptedStyleSheets.pop());
    if (before.equals(after)) return true;
  }
  return false;
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

/** What axe finds in both themes, on a page or in a frame of it. */
export async function axeInThemes(page, place = page) {
  const wrong = [];
  for (const colorScheme of ["dark", "light"]) {
    await page.emulateMedia({ colorScheme });
    wrong.push(...(await axe(place)).map((violation) => `${colorScheme}: ${violation}`));
  }
  return wrong;
}

/** By how many pixels a page or a frame is wider than its place. */
export const excess = (place) => place.evaluate(() => document.documentElement.scrollWidth - innerWidth);

/** Requests to others than the console's own server. */
export function foreign(seen, at = base) {
  const { origin } = new URL(at);
  return seen.requests.filter((url) => !url.startsWith(`${origin}/`) && !/^(data|blob|about):/.test(url));
}

/**
 * Nothing went wrong on a page but what a test has brought about, and it asked nobody but its own server. That there is no session
 * yet, or no fleet, is no error.
 */
export function assertClean(seen, at = base, expected = undefined) {
  assert.deepEqual(
    {
      errors: seen.errors.filter((error) => !NONE_YET.test(error) && !expected?.test(error)),
      violations: seen.violations,
      foreign: foreign(seen, at),
    },
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

/** The addresses of all pages, for a host with these objects. */
export const pagesOf = (names) => [
  "#/",
  "#/catalogs",
  ...["", "?tab=figures", "?tab=sizing", "?tab=versions", "?tab=settings", "?tab=events"].map(
    (tab) => `#/catalogs/${names.catalog}${tab}`,
  ),
  "#/catalogs/new",
  ...["machines", "cache", "identity", "review"].map((step) => `#/catalogs/new?step=${step}`),
  "#/machines",
  ...["", "?tab=figures", "?tab=sizing", "?tab=details", "?tab=events"].map(
    (tab) => `#/machines/${names.machine}${tab}`,
  ),
  "#/images",
  `#/images/${names.image}`,
  "#/stores",
  "#/operations",
  "#/events",
  "#/reports",
  "#/about",
  "#/nothing",
];

const run = (words) =>
  execFileSync(process.env.SPILLWAY, [...words, "--json"], { encoding: "utf8", maxBuffer: 1 << 28 });
/** What the command line says, as JSON. */
export const spillway = (...words) => JSON.parse(run(words));
/** What the command line says, in a list of JSON lines. */
export const lines = (...words) =>
  run(words)
    .trim()
    .split("\n")
    .filter(Boolean)
    .map((line) => JSON.parse(line));

/** Asks who runs this script for what it cannot do, and waits until that is done. */
export async function ask(wish) {
  const input = createInterface({ input: process.stdin });
  console.log(`ask: ${wish}`);
  const [answer] = await once(input, "line");
  input.close();
  assert.equal(answer, "done");
}

const begun = Date.now();
/** Says what a script does, and when. */
export const say = (text) => console.log(`[${((Date.now() - begun) / 1000).toFixed(0)} s] ${text}`);

export const median = (numbers) => [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)];

/**
 * Says why a script has failed: the error first, then what is shown by each frame of each page, a console's before the page that it
 * is in. Who keeps only the first lines knows the most important.
 */
export async function tellFailure(browser, error) {
  console.error(`failed: ${error.message}`);
  for (const context of browser.contexts())
    for (const page of context.pages())
      for (const frame of page.frames().reverse()) {
        const text = await frame.locator(".xterm-rows, body").last().innerText({ timeout: 5000 }).catch(String);
        console.error(`${frame.url()} shows:\n${text.replace(/\n\s*\n+/g, "\n").trim()}`);
      }
}

/** Takes a picture of a page, wide and narrow, for the book: if SPILLWAY_SHOTS names a folder. */
export async function shot(page, name) {
  if (!process.env.SPILLWAY_SHOTS) return;
  const before = page.viewportSize();
  // Messages of acts cover what is behind them.
  await page.waitForFunction(() => !document.querySelector(".toast.done"));
  for (const width of [1280, 390]) {
    await page.setViewportSize({ width, height: width === 390 ? 844 : 900 });
    await page.waitForTimeout(600);
    await page.screenshot({ path: `${process.env.SPILLWAY_SHOTS}/${name}-${width}.png` });
  }
  await page.setViewportSize(before);
}
