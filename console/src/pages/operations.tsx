// Long work in the daemon, with its progress.
import { ask } from "../acts.ts";
import { api, type Operation } from "../api/client.ts";
import { line } from "../commands.ts";
import { useList } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { bytes, percent } from "../ui/format.ts";
import { Badge, PageHead, Pending } from "../ui/parts.tsx";
import { type Column, Table } from "../ui/table.tsx";

const COLUMNS: Column<Operation>[] = [
  { key: "what", title: "Operation", sort: (o) => o.what, cell: (o) => o.what },
  {
    key: "state",
    title: "State",
    sort: (o) => o.state.phase,
    cell: (o) => (
      <span class="stack">
        <span>
          <Badge tone={o.state.phase === "done" ? "good" : o.state.phase === "failed" ? "critical" : "note"}>
            {o.state.phase}
          </Badge>
        </span>
        {o.state.phase === "failed" ? <span class="critical-text">{o.state.error.detail}</span> : null}
      </span>
    ),
  },
  {
    key: "progress",
    title: "Progress",
    isFigure: true,
    sort: (o) => (o.total_bytes ? o.done_bytes / o.total_bytes : 0),
    cell: (o) => (
      <span class="fill-cell">
        <progress
          aria-label={o.what}
          max={Math.max(1, o.total_bytes)}
          value={o.state.phase === "done" ? Math.max(1, o.total_bytes) : o.done_bytes}
        />
        <span class="number">
          {o.total_bytes ? percent(Math.min(1, o.done_bytes / o.total_bytes), 0) : bytes(o.done_bytes)}
        </span>
      </span>
    ),
  },
  { key: "id", title: "Id", isFigure: true, isWide: true, sort: (o) => o.id, cell: (o) => o.id },
  {
    key: "acts",
    title: "Acts",
    cell: (o) =>
      o.state.phase === "running" ? (
        <button
          type="button"
          disabled={!can("admin")}
          onClick={() =>
            ask({
              title: `Cancel this operation?`,
              consequences: [`It ends: ${o.what}.`, "What it has done is undone."],
              verb: "Cancel it",
              isDestructive: true,
              command: line("spillway", "operation", "cancel", String(o.id)),
              run: () => api.delete("/v1/operations/{id}", { path: { id: o.id } }),
              done: `The operation is cancelled.`,
            })
          }
        >
          Cancel
        </button>
      ) : null,
  },
];

export function OperationsPage() {
  const list = useList<Operation>("/v1/operations", 1500);
  return (
    <>
      <PageHead
        title="Operations"
        about="Imports, downloads, pushes and other long work. The list is empty after a restart of the daemon"
      />
      {list.data ? (
        <Table
          label="Operations"
          rows={list.data}
          columns={COLUMNS}
          id={(o) => String(o.id)}
          initial="id"
          empty="Nothing runs, and nothing has run since the daemon started."
        />
      ) : (
        <Pending error={list.error} what="the operations" />
      )}
    </>
  );
}
