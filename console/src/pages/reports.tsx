// Reports of the lab that are kept on the host, opened in place. A report is a document without rights: it runs no scripts, and
// sees nothing of this page.
import type { Schemas } from "../api/client.ts";
import { href } from "../router.ts";
import { useList } from "../state/resource.ts";
import { now } from "../state/visible.ts";
import { through } from "../shown-host.ts";
import { transport } from "../transport.ts";
import { ago, bytes } from "../ui/format.ts";
import { Notice, PageHead, Panel, Pending } from "../ui/parts.tsx";
import { type Column, Table } from "../ui/table.tsx";

type Report = Schemas["Report"];

const COLUMNS: Column<Report>[] = [
  {
    key: "name",
    title: "Report",
    sort: (r) => r.name,
    cell: (r) => <a href={href(["reports", r.name])}>{r.name}</a>,
  },
  {
    key: "written",
    title: "Written",
    isFigure: true,
    sort: (r) => Date.parse(r.written),
    cell: (r) => ago(r.written, now.value),
  },
  { key: "size", title: "Size", isFigure: true, sort: (r) => r.bytes, cell: (r) => bytes(r.bytes) },
];

export function ReportsPage() {
  const reports = useList<Report>("/v1/reports");
  return (
    <>
      <PageHead title="Reports of the lab" />
      <Panel title="Reports" flush>
        {reports.data ? (
          <Table
            label="Reports"
            rows={reports.data}
            columns={COLUMNS}
            id={(r) => r.name}
            initial="written"
            empty="There are no reports. 'spillway lab run STUDY --out /var/lib/spillway/reports/NAME' keeps one here."
          />
        ) : (
          <Pending error={reports.error} what="the reports" />
        )}
      </Panel>
    </>
  );
}

export function ReportPage({ name }: { name: string }) {
  const reports = useList<Report>("/v1/reports");
  const head = <PageHead title={name} crumbs={[{ text: "Reports", to: ["reports"] }]} />;
  if (!reports.data?.some((r) => r.name === name)) {
    return (
      <>
        {head}
        {reports.data ? (
          <Notice>There is no report {name}.</Notice>
        ) : (
          <Pending error={reports.error} what="the reports" />
        )}
      </>
    );
  }
  return (
    <>
      {head}
      <iframe
        class="report"
        sandbox=""
        title={`Report ${name}`}
        src={transport.document(through(`/v1/reports/${encodeURIComponent(name)}/report.html`))}
      />
    </>
  );
}
