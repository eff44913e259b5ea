//! One thread, one clock, one seed: the runtime on which a simulated cluster runs.
//!
//! Every task belongs to an owner: a process of the cluster, or the world around it. Whose turn it is among the tasks that can go on is
//! drawn from the seed. When none can, time jumps to the next timer. An owner can be killed, which drops all its tasks wherever they are,
//! as `kill -9` does; or paused, as `SIGSTOP` does; and its clock may run at a rate of its own.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use openraft::AsyncRuntime;
use openraft_rand::SeedableRng;
use openraft_rand::rngs::SmallRng;
use openraft_rt_sim::SimRuntime;
use parking_lot::Mutex;

use super::random::Random;

/// Whose a task is; 0 is the world.
pub(super) type Owner = u64;
/// The owner of everything that is no process of the cluster.
pub(super) const WORLD: Owner = 0;
/// Clocks start here, so that nothing is subtracted below zero.
const EPOCH: u64 = 86_400_000_000_000;
/// More than any instant takes: a task that never waits is a fault.
const MAX_POLLS: u64 = 1_000_000;

type TaskId = u64;
type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A process, as the runtime sees it.
#[derive(Debug, Default)]
struct Process {
    paused: bool,
    /// How much faster its clock runs, in millionths.
    drift: i64,
    /// What could go on if it were not paused.
    held: Vec<TaskId>,
}

struct Slot {
    owner: Owner,
    task: Option<Task>,
    queued: bool,
}

struct Schedule {
    /// Nanoseconds since the start.
    now: u64,
    random: Random,
    tasks: BTreeMap<TaskId, Slot>,
    ready: Vec<TaskId>,
    timers: BTreeMap<(u64, u64), Waker>,
    processes: BTreeMap<Owner, Process>,
    current: Owner,
    next: u64,
    polls: u64,
    total_polls: u64,
}

struct Shared(Mutex<Schedule>);

thread_local! {
    static CURRENT: RefCell<Option<Arc<Shared>>> = const { RefCell::new(None) };
}

fn current() -> Arc<Shared> {
    CURRENT.with(|current| current.borrow().clone()).expect("outside of a simulation")
}

impl Schedule {
    fn local(&self, owner: Owner) -> u64 {
        let drift = self.processes.get(&owner).map_or(0, |process| process.drift);
        EPOCH + self.now.saturating_add_signed((i128::from(self.now) * i128::from(drift) / 1_000_000) as i64)
    }

    /// When an owner's clock shows `local`.
    fn when(&self, owner: Owner, local: u64) -> u64 {
        let drift = self.processes.get(&owner).map_or(0, |process| process.drift);
        let at = i128::from(local.saturating_sub(EPOCH)) * 1_000_000 / (1_000_000 + i128::from(drift));
        u64::try_from(at).unwrap_or(u64::MAX).saturating_add(1)
    }

    fn wake(&mut self, id: TaskId) {
        let Some(slot) = self.tasks.get_mut(&id) else { return };
        if std::mem::replace(&mut slot.queued, true) {
            return;
        }
        match self.processes.get_mut(&slot.owner).filter(|process| process.paused) {
            Some(process) => process.held.push(id),
            None => self.ready.push(id),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

struct TaskWaker {
    id: TaskId,
    shared: Weak<Shared>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(shared) = self.shared.upgrade() {
            shared.0.lock().wake(self.id);
        }
    }
}

impl Shared {
    fn spawn(&self, owner: Owner, task: Task) {
        let mut schedule = self.0.lock();
        let id = schedule.number();
        schedule.tasks.insert(id, Slot { owner, task: Some(task), queued: false });
        schedule.wake(id);
    }
}

/// The runtime, as openraft sees it; and what a test does with it.
#[derive(Debug)]
pub(super) struct Sim;

impl Sim {
    /// Runs a future and everything that it spawns, until the future ends. Returns its output and the number of polls.
    pub fn run<T: Send + 'static>(seed: u64, main: impl Future<Output = T> + Send + 'static) -> (T, u64) {
        let shared = Arc::new(Shared(Mutex::new(Schedule {
            now: 0,
            random: Random::new(seed),
            tasks: BTreeMap::new(),
            ready: Vec::new(),
            timers: BTreeMap::new(),
            processes: BTreeMap::new(),
            current: WORLD,
            next: 0,
            polls: 0,
            total_polls: 0,
        })));
        CURRENT.with(|current| *current.borrow_mut() = Some(Arc::clone(&shared)));
        let _end = End;
        let result = Arc::new(Mutex::new(None));
        let slot = Arc::clone(&result);
        shared.spawn(
            WORLD,
            Box::pin(async move {
                let output = main.await;
                *slot.lock() = Some(output);
            }),
        );
        loop {
            turn(&shared);
            if let Some(output) = result.lock().take() {
                return (output, shared.0.lock().total_polls);
            }
        }
    }

    /// Spawns a task of another owner.
    pub fn spawn_as(owner: Owner, task: impl Future<Output = ()> + Send + 'static) {
        current().spawn(owner, Box::pin(task));
    }

    /// Ends all tasks of an owner, wherever they are.
    pub fn kill(owner: Owner) {
        let shared = current();
        let mut schedule = shared.0.lock();
        schedule.processes.remove(&owner);
        let dead: Vec<TaskId> =
            schedule.tasks.iter().filter(|(_, slot)| slot.owner == owner).map(|(id, _)| *id).collect();
        let dead: Vec<Slot> = dead.into_iter().filter_map(|id| schedule.tasks.remove(&id)).collect();
        let tasks = std::mem::take(&mut schedule.tasks);
        schedule.ready.retain(|id| tasks.contains_key(id));
        schedule.tasks = tasks;
        drop(schedule);
        // Outside of the lock: what they hold may have timers, and wakes others.
        drop(dead);
    }

    /// Stops an owner's tasks, or lets them go on.
    pub fn pause(owner: Owner, paused: bool) {
        let shared = current();
        let mut schedule = shared.0.lock();
        let process = schedule.processes.entry(owner).or_default();
        if std::mem::replace(&mut process.paused, paused) == paused {
            return;
        }
        if paused {
            let tasks = std::mem::take(&mut schedule.tasks);
            let is_held = |id: &TaskId| tasks.get(id).is_some_and(|slot| slot.owner == owner);
            let (held, ready): (Vec<_>, Vec<_>) = std::mem::take(&mut schedule.ready).into_iter().partition(is_held);
            schedule.ready = ready;
            schedule.tasks = tasks;
            schedule.processes.entry(owner).or_default().held = held;
        } else {
            let held = std::mem::take(&mut process.held);
            schedule.ready.extend(held);
        }
    }

    /// Lets an owner's clock run faster by so many millionths. To be set before it has any timer.
    pub fn drift(owner: Owner, drift: i64) {
        current().0.lock().processes.entry(owner).or_default().drift = drift;
    }

    /// Microseconds since the start, by the clock of the world.
    pub fn micros() -> u64 {
        current().0.lock().now / 1_000
    }

    /// Whose task this is.
    pub fn owner() -> Owner {
        current().0.lock().current
    }
}

/// Empties the thread for the next run, also after a panic.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        loop {
            let tasks = std::mem::take(&mut current().0.lock().tasks);
            if tasks.is_empty() {
                break;
            }
            drop(tasks);
        }
        CURRENT.with(|current| *current.borrow_mut() = None);
    }
}

/// Polls one task, or lets time jump.
fn turn(shared: &Arc<Shared>) {
    let mut schedule = shared.0.lock();
    if schedule.ready.is_empty() {
        let Some(entry) = schedule.timers.first_entry() else { panic!("nothing can ever happen again") };
        let ((at, _), waker) = entry.remove_entry();
        schedule.now = schedule.now.max(at);
        schedule.polls = 0;
        drop(schedule);
        return waker.wake();
    }
    schedule.polls += 1;
    schedule.total_polls += 1;
    assert!(schedule.polls < MAX_POLLS, "a task never waits");
    let count = schedule.ready.len();
    let index = schedule.random.below(count);
    let id = schedule.ready.swap_remove(index);
    let Some(slot) = schedule.tasks.get_mut(&id) else { return };
    slot.queued = false;
    let owner = slot.owner;
    let Some(mut task) = slot.task.take() else { return };
    schedule.current = owner;
    drop(schedule);
    let waker = Waker::from(Arc::new(TaskWaker { id, shared: Arc::downgrade(shared) }));
    let polled = task.as_mut().poll(&mut Context::from_waker(&waker));
    let mut schedule = shared.0.lock();
    schedule.current = WORLD;
    if polled.is_ready() {
        schedule.tasks.remove(&id);
    } else if let Some(slot) = schedule.tasks.get_mut(&id) {
        slot.task = Some(task);
        return;
    }
    // Outside of the lock: what it holds may have timers, and wakes others.
    drop(schedule);
    drop(task);
}

/// A point on the clock of an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Instant(u64);

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 4)
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(nanos(duration)))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;
    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(duration)))
    }
}

impl SubAssign<Duration> for Instant {
    fn sub_assign(&mut self, duration: Duration) {
        *self = *self - duration;
    }
}

impl Sub for Instant {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl openraft::Instant for Instant {
    fn now() -> Self {
        let shared = current();
        let schedule = shared.0.lock();
        Self(schedule.local(schedule.current))
    }
}

/// A timer on the clock of the owner that made it.
#[derive(Debug)]
pub(super) struct Sleep {
    owner: Owner,
    deadline: u64,
    timer: Option<(u64, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let shared = current();
        let mut schedule = shared.0.lock();
        if schedule.local(self.owner) >= self.deadline {
            return Poll::Ready(());
        }
        let key = match self.timer {
            Some(key) if key.0 > schedule.now => key,
            _ => {
                let at = schedule.when(self.owner, self.deadline).max(schedule.now + 1);
                (at, schedule.number())
            }
        };
        schedule.timers.insert(key, context.waker().clone());
        self.timer = Some(key);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let Some(key) = self.timer else { return };
        let shared = CURRENT.with(|current| current.borrow().clone());
        if let Some(shared) = shared {
            shared.0.lock().timers.remove(&key);
        }
    }
}

/// The time was over.
#[derive(Debug)]
pub(super) struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the time is over")
    }
}

/// A future with a deadline.
pub(super) struct Timeout<F> {
    future: Pin<Box<F>>,
    sleep: Sleep,
}

impl<F: Future> Future for Timeout<F> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(output) = self.future.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        Pin::new(&mut self.sleep).poll(context).map(|()| Err(Elapsed))
    }
}

/// Why a task has no output: its owner was killed.
#[derive(Debug)]
pub(super) struct Killed;

impl fmt::Display for Killed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("its process was killed")
    }
}

/// The output of a task, to come.
pub(super) struct JoinHandle<T>(tokio::sync::oneshot::Receiver<T>);

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, Killed>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map_err(|_| Killed)
    }
}

impl AsyncRuntime for Sim {
    type JoinError = Killed;
    type JoinHandle<T: Send + 'static> = JoinHandle<T>;
    type Sleep = Sleep;
    type Instant = Instant;
    type TimeoutError = Elapsed;
    type Timeout<R, F: Future<Output = R> + Send> = Timeout<F>;
    type ThreadLocalRng = SmallRng;
    // These need no runtime, and wake others in the order in which they have waited.
    type Mpsc = <SimRuntime as AsyncRuntime>::Mpsc;
    type Watch = <SimRuntime as AsyncRuntime>::Watch;
    type Oneshot = <SimRuntime as AsyncRuntime>::Oneshot;
    type Mutex<T: Send + 'static> = <SimRuntime as AsyncRuntime>::Mutex<T>;

    fn spawn<F>(future: F) -> Self::JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let task = async move { drop(sender.send(future.await)) };
        Self::spawn_as(Self::owner(), task);
        JoinHandle(receiver)
    }

    fn sleep(duration: Duration) -> Sleep {
        Self::sleep_until(<Instant as openraft::Instant>::now() + duration)
    }

    fn sleep_until(deadline: Instant) -> Sleep {
        Sleep { owner: Self::owner(), deadline: deadline.0, timer: None }
    }

    fn timeout<R, F: Future<Output = R> + Send>(duration: Duration, future: F) -> Timeout<F> {
        Timeout { future: Box::pin(future), sleep: Self::sleep(duration) }
    }

    fn timeout_at<R, F: Future<Output = R> + Send>(deadline: Instant, future: F) -> Timeout<F> {
        Timeout { future: Box::pin(future), sleep: Self::sleep_until(deadline) }
    }

    fn is_panic(_: &Killed) -> bool {
        false
    }

    fn thread_rng() -> SmallRng {
        SmallRng::seed_from_u64(current().0.lock().random.next())
    }

    fn new(_threads: usize) -> Self {
        Self
    }

    fn block_on<F: Future<Output = T>, T>(&mut self, _: F) -> T {
        unreachable!("a run is begun by Sim::run")
    }

    fn spawn_blocking<F, T>(work: F) -> impl Future<Output = Result<T, io::Error>> + Send
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        std::future::ready(Ok(work()))
    }
}
