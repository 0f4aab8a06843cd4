// All machines of the host.
import { MachineTable } from "../ui/machine-table.tsx";
import { PageHead } from "../ui/parts.tsx";

export function MachinesPage() {
  return (
    <>
      <PageHead title="Machines" />
      <MachineTable />
    </>
  );
}
