// BullMQ on Node: the same steps as benchmarks/peers/kit.py describes, for jobs that are locked while they run.
import { spawn } from 'node:child_process';
import { appendFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const require = createRequire(`${process.cwd()}/`);
const { Queue, Worker } = require('bullmq');
const place = new URL(process.env.BENCH_URL);
const connection = { host: place.hostname, port: Number(place.port), maxRetriesPerRequest: null };
const WORK = process.env.BENCH_WORK ?? 'nothing';
const SLOTS = parseInt(process.env.BENCH_SETTING, 10) || 16;
const BODY = { sent: 0, text: 'x'.repeat(WORK === 'nothing' ? 80 : 1004) };
const WAIT_MS = 5;
const COMPUTE_US = 2000;
const OPTIONS = { removeOnComplete: true };
const BULK = 500;
const [step, ...numbers] = process.argv.slice(2);
const [first, second, third] = numbers.map(Number);

const now = () => (performance.timeOrigin + performance.now()) / 1000;
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// Take that much time of the processor, however busy it is.
function compute() {
  const begun = process.cpuUsage();
  let spent;
  do {
    for (let i = 0; i < 1000; i++) Math.sqrt(i);
    spent = process.cpuUsage(begun);
  } while (spent.user + spent.system < COMPUTE_US);
}

const work = { nothing: async () => {}, wait: () => sleep(WAIT_MS), compute: async () => compute() }[WORK];

async function timed(publish) {
  const queue = new Queue('bench', { connection });
  await queue.add('handle', BODY, OPTIONS);
  const began = performance.now();
  await publish(queue);
  const seconds = (performance.now() - began) / 1000;
  await queue.close();
  return seconds;
}

async function published(publish) {
  const queue = new Queue('bench', { connection });
  await publish(queue);
  await queue.close();
  return null;
}

const steps = {
  one: () =>
    timed(async (queue) => {
      for (let i = 0; i < first; i++) await queue.add('handle', BODY, OPTIONS);
    }),
  bulk: () =>
    timed(async (queue) => {
      for (let left = first; left > 0; left -= BULK) {
        const size = Math.min(BULK, left);
        await queue.addBulk(Array.from({ length: size }, () => ({ name: 'handle', data: BODY, opts: OPTIONS })));
      }
    }),
  late: () =>
    published(async (queue) => {
      const start = now() + third;
      for (let i = 0; i < first * second; i++) {
        const due = start + i / first;
        const delay = Math.max(0, Math.round((due - now()) * 1000));
        await queue.add('note', { ...BODY, sent: due }, { ...OPTIONS, delay });
      }
    }),
  delayed: () =>
    published(async (queue) => {
      for (let i = 0; i < first; i++) await queue.add('handle', BODY, { ...OPTIONS, delay: 3_600_000 });
    }),
  slow: () =>
    published(async (queue) => {
      await queue.add('note', { ...BODY, sent: null }, OPTIONS);
      for (let i = 0; i < first; i++) {
        await sleep(30);
        await queue.add('note', { ...BODY, sent: now() }, OPTIONS);
      }
    }),
  work: () => {
    for (let i = 0; i < first; i++) spawn(process.execPath, [process.argv[1], 'serve'], { stdio: 'inherit' });
    return new Promise(() => setInterval(() => {}, 1e6));
  },
  serve: () => {
    const handle = async (job) => {
      if (job.name !== 'note') await work();
      else if (job.data.sent !== null)
        appendFileSync(process.env.BENCH_LOG, `${(now() - job.data.sent).toFixed(6)}\n`);
    };
    new Worker('bench', handle, { connection, concurrency: SLOTS });
    return new Promise(() => setInterval(() => {}, 1e6));
  },
};

console.log(JSON.stringify({ seconds: await steps[step]() }));
process.exit(0);
