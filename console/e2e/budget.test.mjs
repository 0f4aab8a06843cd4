// What the browser loads before the first page shows its host: by what the browser says, of every request to any address.
//
// Files (of the page and below it) count in bytes and number. What the API answers depends on the host, not on the console: its
// requests and bytes are told, and are in no budget.
import assert from "node:assert/strict";
import { test } from "node:test";
import { base, go, launch, open } from "./lib.mjs";

const MOST_BYTES = 80 * 1024;
const MOST_REQUESTS = 6;

test("the first page keeps its budget", async (t) => {
  const browser = await launch();
  t.after(() => browser.close());
  const { context, page } = await open(browser);
  const cdp = await page.context().newCDPSession(page);
  const all = new Map();
  await cdp.send("Network.enable");
  cdp.on("Network.requestWillBeSent", ({ requestId, request }) => {
    all.set(requestId, { url: request.url, bytes: 0 });
  });
  cdp.on("Network.loadingFinished", ({ requestId, encodedDataLength }) => {
    const one = all.get(requestId);
    if (one) one.bytes = encodedDataLength;
  });
  await go(page, "#/");
  await page.waitForTimeout(1000);
  const api = new URL("../v1/", base).href;
  const answers = [...all.values()].filter(({ url }) => url.startsWith(api));
  // Whatever is no answer of the API is a file of the page, wherever it comes from.
  const files = [...all.values()].filter(({ url }) => !url.startsWith(api) && !url.startsWith("data:"));
  const sum = (requests) => requests.reduce((bytes, one) => bytes + one.bytes, 0);
  console.log(`${files.length} files, ${sum(files)} bytes; ${answers.length} answers, ${sum(answers)} bytes`);
  const bytes = sum(files);
  assert.ok(bytes > 0 && bytes <= MOST_BYTES, `${bytes} bytes: ${JSON.stringify(files)}`);
  assert.ok(files.length <= MOST_REQUESTS, `${files.length} requests: ${JSON.stringify(files)}`);
  assert.ok(answers.length > 0, "the first page shows what the API answers");
  await context.close();
});
