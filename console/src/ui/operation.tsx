// Long work in the daemon: its progress, how it has ended, and the act that cancels it.
import { ask } from "../acts.ts";
import { api, type Operation } from "../api/client.ts";
import { line } from "../commands.ts";
import { outcomeText, progressOf } from "../image-words.ts";
import { href } from "../router.ts";
import { useList } from "../state/resource.ts";
import { can } from "../state/session.ts";
import type { Act } from "./dialog.tsx";
import { bytes, percent } from "./format.ts";
import { Badge, Panel, type Tone } from "./parts.tsx";

const TONE: Record<Operation["state"]["phase"], Tone> = { running: "note", done: "good", failed: "critical" };

export function cancelOperation(o: Operation): Act {
  return {
    title: "Cancel this operation?",
    consequences: [
      `It ends as soon as it can: ${o.what}.`,
      "What it has made on this host is removed. Chunks that it has sent to a registry stay there.",
    ],
    verb: "Cancel it",
    isDestructive: true,
    command: line("spillway", "operation", "cancel", String(o.id)),
    run: () => api.delete("/v1/operations/{id}", { path: { id: o.id } }),
    done: `Operation ${o.id} is told to stop.`,
  };
}

export function OperationState({ operation }: { operation: Operation }) {
  const { state } = operation;
  const outcome = outcomeText(operation);
  return (
    <span class="stack">
      <Badge tone={TONE[state.phase]}>
        {state.phase === "failed" && state.error.code === "cancelled" ? "cancelled" : state.phase}
      </Badge>
      {state.phase === "failed" && state.error.code !== "cancelled" ? (
        <span class="critical-text">{state.error.detail}</span>
      ) : null}
      {outcome ? <span>{outcome}</span> : null}
    </span>
  );
}

/** A bar; without an end while the size of the work is not known. */
export function OperationProgress({ operation }: { operation: Operation }) {
  const done = progressOf(operation);
  return (
    <span class="fill-cell">
      {done === null ? (
        <progress aria-label={operation.what} />
      ) : (
        <progress aria-label={operation.what} max={1} value={done} />
      )}
      <span class="number">{done === null ? bytes(operation.done_bytes) : percent(done, 0)}</span>
    </span>
  );
}

export function CancelButton({ operation }: { operation: Operation }) {
  if (operation.state.phase !== "running" || !can("admin")) return null;
  return (
    <button type="button" onClick={() => ask(cancelOperation(operation))}>
      Cancel
    </button>
  );
}

/** Operations that have ended stay in the list: on other pages these many of the last are enough. */
const ENDED = 2;

/** Those of an image, or of all: what runs, and how the last ones have ended. */
export function OperationsPanel({ image, ended = ENDED }: { image?: string; ended?: number }) {
  const list = useList<Operation>("/v1/operations", 1500);
  const of = (list.data ?? []).filter((o) => image === undefined || o.image?.split(":")[0] === image);
  const running = of.filter((o) => o.state.phase === "running");
  const last = ended ? of.filter((o) => o.state.phase !== "running").slice(-ended) : [];
  const shown = [...running, ...last.reverse()];
  if (shown.length === 0) return null;
  return (
    <Panel title="Operations" aside={<a href={href(["operations"])}>All operations</a>}>
      <ul class="plain-list">
        {shown.map((o) => (
          <li key={o.id} class="operation">
            <span>{o.what}</span>
            {o.state.phase === "running" ? (
              <OperationProgress operation={o} />
            ) : (
              <OperationState operation={o} />
            )}
            <CancelButton operation={o} />
          </li>
        ))}
      </ul>
    </Panel>
  );
}
