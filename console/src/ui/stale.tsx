// What is shown although it could not be read again: how old it is, and why. One notice for all parts of a page.
import { words } from "../api/client.ts";
import { staleFigures } from "../state/figures.ts";
import { oldParts } from "../state/resource.ts";
import { awaySince } from "../state/session.ts";
import { now } from "../state/visible.ts";
import { duration } from "./format.ts";
import { Notice } from "./parts.tsx";

export function StaleNotice() {
  // Also says so again when the daemon answers, and only some requests fail.
  const figures = staleFigures(now.value);
  const old = [...(figures ? [{ parts: ["figures"], ...figures }] : []), ...oldParts(now.value)];
  if (old.length === 0 || awaySince.value !== null) return null;
  return (
    <Notice tone="warning">
      <strong>A part of this page is old or not there.</strong> The page tries again by itself.
      <ul>
        {old.map(({ parts, at, error }) => (
          <li key={parts.join("/")}>
            <code>{parts.join("/")}</code>:{" "}
            {at === null ? "not read yet" : `read ${duration((now.value - at) / 1000)} ago`}.{" "}
            {error ? `Reading it again failed: ${words(error)}` : "The daemon is slow to answer."}
          </li>
        ))}
      </ul>
    </Notice>
  );
}
