import "./dom.ts";
import assert from "node:assert/strict";
import { test } from "node:test";
import { inPlace, range } from "../src/ui/table.tsx";

test("a range is of names, wherever the rows are by now", () => {
  assert.deepEqual(range(["a", "b", "c", "d"], "b", "d"), ["b", "c", "d"]);
  assert.deepEqual(range(["a", "b", "c", "d"], "d", "b"), ["b", "c", "d"]);
  // The table has sorted itself since the first click.
  assert.deepEqual(range(["d", "b", "a", "c"], "b", "a"), ["b", "a"]);
  assert.deepEqual(range(["a", "c"], "b", "c"), ["c"], "the first is not shown any more");
  assert.deepEqual(range(["a", "c"], null, "c"), ["c"]);
});

test("rows keep their places, and others follow", () => {
  const id = (row: { name: string }) => row.name;
  const rows = ["new", "c", "a", "b", "other"].map((name) => ({ name }));
  assert.deepEqual(inPlace(rows, id, ["a", "b", "gone", "c"]).map(id), ["a", "b", "c", "new", "other"]);
});
