// BullMQ on Node: the same steps as benchmarks/peers/kit.py describes, for jobs that are locked while they run.
import { spawn } from 'node:child_process';
import { appendFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const require = createRequire(`${process.cwd()}/`);
const { Queue, Worker } = require('bullmq');
const place = new URL(process.env.BENCH_URL);
const connection = { host: place.hostname, port: Number(place.port), maxRetriesPerRequest: null };
const BODY = { sent: 0, text: 'x'.repeat(80) };
const OPTIONS = { removeOnComplete: true };
const BULK = 500;
const [step, ...numbers] = process.argv.slice(2);
const [first, second, third] = numbers.map(Number);

const now = () => (performance.timeOrigin + performance.now()) / 1000;
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

async function timed(work) {
  const queue = new Queue('bench', { connection });
  await queue.add('nothing', BODY, OPTIONS);
  const began = performance.now();
  await work(queue);
  const seconds = (performance.now() - began) / 1000;
  await queue.close();
  return seconds;
}

async function published(work) {
  const queue = new Queue('bench', { connection });
  await work(queue);
  await queue.close();
  return null;
}

const steps = {
  one: () =>
    timed(async (queue) => {
      for (let i = 0; i < first; i++) await queue.add('nothing', BODY, OPTIONS);
    }),
  bulk: () =>
    timed(async (queue) => {
      for (let left = first; left > 0; left -= BULK) {
        const size = Math.min(BULK, left);
        await queue.addBulk(Array.from({ length: size }, () => ({ name: 'nothing', data: BODY, opts: OPTIONS })));
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
      for (let i = 0; i < first; i++) await queue.add('nothing', BODY, { ...OPTIONS, delay: 3_600_000 });
    }),
  slow: () =>
    published(async (queue) => {
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
      if (job.name === 'note') appendFileSync(process.env.BENCH_LOG, `${(now() - job.data.sent).toFixed(6)}\n`);
    };
    new Worker('bench', handle, { connection, concurrency: 100 });
    return new Promise(() => setInterval(() => {}, 1e6));
  },
};

console.log(JSON.stringify({ seconds: await steps[step]() }));
process.exit(0);
