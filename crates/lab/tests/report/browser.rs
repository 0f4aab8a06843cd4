//! Chromium without a window: looks at pages and prints them.
//!
//! Invariant: a browser that does not end is ended, with a reason in the test.

use std::path::Path;
use std::process::{Command, Output};

/// Starts one for each look, with a profile of its own.
pub struct Browser<'a> {
    /// Where its profile may be.
    pub dir: &'a Path,
    /// Whether pages are to be dark.
    pub dark: bool,
}

impl Browser<'_> {
    fn run(&self, how: &str, page: &Path) -> Output {
        let profile = tempfile::tempdir_in(self.dir).unwrap();
        let mut command = Command::new("timeout");
        command
            .args(["--kill-after=5", "120", "chromium", "--headless=new", "--disable-gpu", "--no-first-run"])
            .args(["--allow-file-access-from-files", "--enable-logging=stderr", "--disable-dev-shm-usage"])
            // Whatever it would fetch is not there.
            .arg("--host-resolver-rules=MAP * ~NOTFOUND")
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!self.dark)));
        if rustix::process::geteuid().is_root() {
            command.arg("--no-sandbox");
        }
        let done = command.arg(how).arg(format!("file://{}", page.display())).output().unwrap();
        assert!(done.status.success(), "{how}: {done:?}");
        done
    }

    /// The page as it stands after its scripts ran, and what they and the browser complained of.
    pub fn dom(&self, page: &Path) -> (String, Vec<String>) {
        let done = self.run("--dump-dom", page);
        let stderr = String::from_utf8_lossy(&done.stderr);
        let complaints = stderr.lines().filter(|line| line.contains("CONSOLE")).map(str::to_owned).collect();
        (String::from_utf8_lossy(&done.stdout).into_owned(), complaints)
    }

    /// How many pages it prints.
    pub fn printed(&self, page: &Path, to: &Path) -> usize {
        self.run(&format!("--print-to-pdf={}", to.display()), page);
        let pdf = std::fs::read(to).unwrap();
        assert!(pdf.starts_with(b"%PDF"));
        let text = String::from_utf8_lossy(&pdf);
        text.match_indices("/Type /Page")
            .filter(|(i, found)| !text[i + found.len()..].starts_with('s'))
            .count()
    }
}
