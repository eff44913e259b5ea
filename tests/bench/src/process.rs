//! Child processes and what `/proc` says about them.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Command, Stdio};

use crate::Result;

/// A child that ends with its handle, its own children too.
pub struct Process {
    child: Child,
}

impl Process {
    /// Starts `command` in a process group of its own.
    pub fn start(mut command: Command) -> Result<Self> {
        use std::os::unix::process::CommandExt;
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: command.spawn().map_err(|error| format!("{command:?}: {error}"))? })
    }

    /// The process id, which is also that of its group.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// CPU seconds (user and system) of the process and all its descendants.
    pub fn cpu_seconds(&self) -> Result<f64> {
        let mut total = 0.0;
        for process in tree(self.id())? {
            if let Some(stat) = stat(process) {
                total += stat.cpu_ticks as f64 / ticks_per_second();
            }
        }
        Ok(total)
    }

    /// Resident memory of the process and all its descendants, in KiB.
    pub fn resident_kib(&self) -> Result<u64> {
        Ok(tree(self.id())?.into_iter().filter_map(resident_kib).sum())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The whole group: a peer may be a shell with children.
        let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", self.id())]).stderr(Stdio::null()).status();
        let _ = self.child.wait();
    }
}

struct Stat {
    parent: u32,
    cpu_ticks: u64,
}

fn stat(process: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The command name is in parentheses and may hold anything.
    let fields: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
    let number = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
    Some(Stat { parent: u32::try_from(number(1)?).ok()?, cpu_ticks: number(11)? + number(12)? })
}

fn tree(root: u32) -> Result<Vec<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        if let Some(process) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
            && let Some(stat) = stat(process)
        {
            children.entry(stat.parent).or_default().push(process);
        }
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(process) = found.get(next) {
        found.extend(children.remove(process).unwrap_or_default());
        next += 1;
    }
    Ok(found)
}

fn resident_kib(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok())
}

/// Linux counts CPU time in hundredths of a second for user space, whatever the kernel's own tick is.
fn ticks_per_second() -> f64 {
    100.0
}

/// What else the machine does.
pub fn load() -> String {
    format!("load average {}", fs::read_to_string("/proc/loadavg").unwrap_or_default().trim())
}

/// One line about the machine.
pub fn machine() -> String {
    let model = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = model.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("");
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("machine: {cores} cores,{}; {}", model.trim_start_matches(['\t', ' ', ':']), load())
}
