// What the first page costs by the wire: the files, not what the API answers.
import assert from "node:assert/strict";
import { test } from "node:test";
import { base, go, launch, open } from "./lib.mjs";

const MOST_BYTES = 80 * 1024;
const MOST_REQUESTS = 6;

test("the first page keeps its budget", async () => {
  const browser = await launch();
  const { context, page } = await open(browser);
  const cdp = await page.context().newCDPSession(page);
  const files = new Map();
  await cdp.send("Network.enable");
  cdp.on("Network.responseReceived", ({ requestId, response }) => {
    if (response.url.startsWith(base)) files.set(requestId, { url: response.url, bytes: 0 });
  });
  cdp.on("Network.loadingFinished", ({ requestId, encodedDataLength }) => {
    const file = files.get(requestId);
    if (file) file.bytes = encodedDataLength;
  });
  await go(page, "#/");
  await page.waitForTimeout(1000);
  const all = [...files.values()];
  const bytes = all.reduce((sum, file) => sum + file.bytes, 0);
  console.log(`${all.length} files, ${bytes} bytes`);
  assert.ok(bytes > 0 && bytes <= MOST_BYTES, `${bytes} bytes: ${JSON.stringify(all)}`);
  assert.ok(all.length <= MOST_REQUESTS, `${all.length} requests: ${JSON.stringify(all)}`);
  await context.close();
  await browser.close();
});
