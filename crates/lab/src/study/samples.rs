//! What was counted while a run went on: one row a machine and second, in a CSV file that anything can read.
//!
//! Columns are raw: sums that only grow, and levels, as they were read; rates are derived by who reads. A place is
//! empty where nothing was known at that time. Times are seconds since the work began; what is before it is negative.

use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

/// The sample of one machine at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Number of the machine, from 0 on.
    pub machine: u32,
    /// Seconds since the work began.
    pub time_s: f64,
    /// In the order of the columns.
    pub values: Vec<Option<f64>>,
}

/// All of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples {
    /// Names of the columns: keys of `spillway stats --json`; `cpu.worker_s` and `cpu.vmm_s`, processor seconds on the host;
    /// `inside.reads`, `inside.read_bytes`, `inside.writes`, `inside.written_bytes`, `inside.cpu_s` of the guest itself.
    pub columns: Vec<String>,
    /// By time.
    pub rows: Vec<Row>,
}

impl Samples {
    /// Adds the sample of a machine at a time. Columns that are new are added.
    pub fn add(&mut self, machine: u32, time_s: f64, known: &BTreeMap<String, f64>) {
        let mut values = vec![None; self.columns.len()];
        for (name, value) in known {
            match self.columns.iter().position(|c| c == name) {
                Some(i) => values[i] = Some(*value),
                None => {
                    self.columns.push(name.clone());
                    values.push(Some(*value));
                }
            }
        }
        self.rows.push(Row { machine, time_s, values });
    }

    /// A value of a row by its column's name.
    pub fn value(&self, row: &Row, column: &str) -> Option<f64> {
        let i = self.columns.iter().position(|c| c == column)?;
        row.values.get(i).copied().flatten()
    }

    /// As CSV.
    pub fn write(&self, to: &mut impl Write) -> std::io::Result<()> {
        write!(to, "machine,time_s")?;
        self.columns.iter().try_for_each(|c| write!(to, ",{c}"))?;
        writeln!(to)?;
        for row in &self.rows {
            write!(to, "{},{:.3}", row.machine, row.time_s)?;
            for i in 0..self.columns.len() {
                match row.values.get(i).copied().flatten() {
                    Some(value) => write!(to, ",{value}")?,
                    None => write!(to, ",")?,
                }
            }
            writeln!(to)?;
        }
        Ok(())
    }

    /// Reads what [`Samples::write`] wrote.
    pub fn read(path: &Path) -> Result<Samples> {
        let file = std::fs::File::open(path).with_context(|| format!("{}: cannot read", path.display()))?;
        Samples::parse(BufReader::new(file)).with_context(|| format!("{}", path.display()))
    }

    fn parse(from: impl BufRead) -> Result<Samples> {
        let mut lines = from.lines();
        let head = lines.next().context("it is empty")??;
        let mut names = head.split(',').map(String::from);
        ensure!(
            names.next().as_deref() == Some("machine") && names.next().as_deref() == Some("time_s"),
            "these are no samples"
        );
        let columns: Vec<String> = names.collect();
        let mut rows = Vec::new();
        for (i, line) in lines.enumerate() {
            let line = line?;
            let wrong = || format!("line {}: '{line}'", i + 2);
            let mut fields = line.split(',');
            let machine = fields.next().and_then(|f| f.parse().ok()).with_context(wrong)?;
            let time_s = fields.next().and_then(|f| f.parse().ok()).with_context(wrong)?;
            let value = |field: &str| match field {
                "" => Ok(None),
                _ => field.parse().map(Some),
            };
            let values: Vec<Option<f64>> = fields.map(value).collect::<Result<_, _>>().with_context(wrong)?;
            ensure!(values.len() == columns.len(), "{}: {} values", wrong(), values.len());
            rows.push(Row { machine, time_s, values });
        }
        Ok(Samples { columns, rows })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut samples = Samples::default();
        let known = |pairs: &[(&str, f64)]| pairs.iter().map(|(k, v)| (k.to_string(), *v)).collect();
        samples.add(0, -0.5, &known(&[("ram.used_bytes", 4096.0)]));
        samples.add(3, 1.0, &known(&[("inside.cpu_s", 0.25), ("ram.used_bytes", 1e12)]));
        let mut text = Vec::new();
        samples.write(&mut text).unwrap();
        let read = Samples::parse(&text[..]).unwrap();
        assert_eq!(read.columns, ["ram.used_bytes", "inside.cpu_s"]);
        assert_eq!(read.rows[0].values, [Some(4096.0), None]);
        assert_eq!(read.value(&read.rows[1], "inside.cpu_s"), Some(0.25));
        assert_eq!((read.rows[1].machine, read.rows[1].time_s), (3, 1.0));
        for wrong in ["", "time_s,machine\n", "machine,time_s,a\n0,0\n", "machine,time_s,a\n0,0,x\n"] {
            assert!(Samples::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
