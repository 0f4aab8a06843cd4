// Long work in the daemon, with its progress: what runs first.
import type { Operation } from "../api/client.ts";
import { progressOf } from "../image-words.ts";
import { href } from "../router.ts";
import { useList } from "../state/resource.ts";
import { NeedsAdmin } from "../ui/offers.tsx";
import { CancelButton, OperationProgress, OperationState } from "../ui/operation.tsx";
import { PageHead, Pending } from "../ui/parts.tsx";
import { type Column, Table } from "../ui/table.tsx";
import "../style/images.css";

/** What runs, then what has ended; in each the newest first. */
const RUNNING_FIRST = 2 ** 52;
const place = (o: Operation) => (o.state.phase === "running" ? RUNNING_FIRST + o.id : o.id);

const COLUMNS: Column<Operation>[] = [
  {
    key: "what",
    title: "Operation",
    sort: (o) => o.what,
    cell: (o) => {
      const image = o.image?.split(":")[0];
      return <span class="long-text">{image ? <a href={href(["images", image])}>{o.what}</a> : o.what}</span>;
    },
  },
  {
    key: "state",
    title: "State",
    sort: (o) => o.state.phase,
    cell: (o) => (
      <span class="long-text">
        <OperationState operation={o} />
      </span>
    ),
  },
  {
    key: "progress",
    title: "Progress",
    isFigure: true,
    sort: progressOf,
    cell: (o) => <OperationProgress operation={o} />,
  },
  { key: "id", title: "Number", isFigure: true, isWide: true, sort: place, cell: (o) => o.id },
  { key: "acts", title: "Actions", cell: (o) => <CancelButton operation={o} /> },
];

export function OperationsPage() {
  const list = useList<Operation>("/v1/operations", 1500);
  return (
    <>
      <PageHead
        title="Operations"
        about="Imports, downloads, pulls, pushes and other long work. The list is empty after a restart of the daemon"
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
      <NeedsAdmin what="Cancelling an operation" />
    </>
  );
}
