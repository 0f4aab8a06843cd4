// Files of deleted machines that kept data.
import { ask } from "../acts.ts";
import { api, type Schemas } from "../api/client.ts";
import { line } from "../commands.ts";
import { can } from "../state/session.ts";
import { now } from "../state/visible.ts";
import type { Act } from "../ui/dialog.tsx";
import { ago, bytes } from "../ui/format.ts";
import { Panel } from "../ui/parts.tsx";
import { type Column, Table } from "../ui/table.tsx";

type Leftover = Schemas["Leftover"];

const sizeText = (l: Leftover) => (l.allocated_bytes == null ? "not known" : bytes(l.allocated_bytes));

function deleteLeftover(l: Leftover): Act {
  return {
    title: `Delete what ${l.machine} left?`,
    consequences: [
      "The data that the machine kept is gone for good.",
      `It is the only copy on this host. Its size: ${sizeText(l)}.`,
      ...(l.disk ? [`${l.disk.image}:${l.disk.version}, which its disk needs, can be deleted then.`] : []),
    ],
    verb: "Delete",
    isDestructive: true,
    typed: l.machine,
    command: line("spillway", "leftover", "delete", l.uuid),
    run: () => api.delete("/v1/leftovers/{uuid}", { path: { uuid: l.uuid } }),
    done: `What ${l.machine} left is deleted.`,
  };
}

const COLUMNS: Column<Leftover>[] = [
  { key: "machine", title: "Machine", sort: (l) => l.machine, cell: (l) => l.machine },
  { key: "catalog", title: "Catalog", sort: (l) => l.catalog, cell: (l) => l.catalog },
  {
    key: "deleted",
    title: "Deleted",
    isFigure: true,
    sort: (l) => Date.parse(l.deleted),
    cell: (l) => ago(l.deleted, now.value),
  },
  { key: "size", title: "Space", isFigure: true, sort: (l) => l.allocated_bytes, cell: sizeText },
  {
    key: "path",
    title: "Files",
    isWide: true,
    cell: (l) => <code class="clip">{[l.disk?.path, l.data_disk].filter(Boolean).join(", ")}</code>,
  },
  {
    key: "acts",
    title: "Actions",
    cell: (l) =>
      can("admin") ? (
        <button type="button" class="danger-plain" onClick={() => ask(deleteLeftover(l))}>
          Delete
        </button>
      ) : null,
  },
];

export function Leftovers({ leftovers }: { leftovers: Leftover[] }) {
  return (
    <Panel title="Leftovers" aside="data of machines that were deleted" flush>
      <Table
        label="Leftovers"
        rows={leftovers}
        columns={COLUMNS}
        id={(l) => l.uuid}
        initial="deleted"
        sortName="leftovers"
        empty=""
      />
    </Panel>
  );
}
