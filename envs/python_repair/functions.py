# ruff: noqa: SIM108, SIM110 - written as a beginner would
"""Right functions, to be broken by `mutations.py`. A model sees their text, so there are no annotations."""


def average(values):
    """The mean of a list of numbers; 0.0 of an empty one."""
    if len(values) == 0:
        return 0.0
    return sum(values) / len(values)


def balanced(text):
    """Whether every ( has its ) in the right order."""
    depth = 0
    for letter in text:
        if letter == "(":
            depth += 1
        elif letter == ")":
            depth -= 1
        if depth < 0:
            return False
    return depth == 0


def binary_digits(number):
    """A number of at least 0 in base 2, as text without leading zeros."""
    if number == 0:
        return "0"
    digits = ""
    while number > 0:
        digits = str(number % 2) + digits
        number = number // 2
    return digits


def clamp(value, low, high):
    """The number from low to high that is nearest to value."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def collatz_steps(number):
    """How often number is halved when even, or tripled plus one when odd, until it is 1."""
    steps = 0
    while number > 1:
        if number % 2 == 0:
            number = number // 2
        else:
            number = 3 * number + 1
        steps += 1
    return steps


def common_prefix(first, second):
    """The longest text that both texts start with."""
    length = 0
    while length < len(first) and length < len(second) and first[length] == second[length]:
        length += 1
    return first[:length]


def count_vowels(text):
    """How many letters of a text are a, e, i, o or u, in either case."""
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count += 1
    return count


def digit_sum(number):
    """The sum of the decimal digits of a number of at least 0."""
    total = 0
    while number > 0:
        total += number % 10
        number = number // 10
    return total


def distinct(values):
    """The values without repetitions, in the order of their first appearance."""
    seen = []
    for value in values:
        if value not in seen:
            seen.append(value)
    return seen


def divisors(number):
    """All positive divisors of a positive number, in ascending order."""
    found = []
    for candidate in range(1, number + 1):
        if number % candidate == 0:
            found.append(candidate)
    return found


def factorial(number):
    """The product of the numbers from 1 to number; 1 for 0."""
    product = 1
    for factor in range(2, number + 1):
        product *= factor
    return product


def fibonacci(index):
    """The Fibonacci number at an index, counted from fibonacci(0) = 0 and fibonacci(1) = 1."""
    current, following = 0, 1
    for _ in range(index):
        current, following = following, current + following
    return current


def find(values, wanted):
    """The index of the first value that equals wanted; -1 when there is none."""
    for index in range(len(values)):
        if values[index] == wanted:
            return index
    return -1


def greatest_divisor(first, second):
    """The greatest number that divides both numbers."""
    while second != 0:
        first, second = second, first % second
    return first


def is_leap_year(year):
    """Whether a year of the Gregorian calendar has 366 days."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def is_palindrome(text):
    """Whether a text reads the same in both directions."""
    left = 0
    right = len(text) - 1
    while left < right:
        if text[left] != text[right]:
            return False
        left += 1
        right -= 1
    return True


def is_prime(number):
    """Whether a number is prime."""
    if number < 2:
        return False
    divisor = 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 1
    return True


def is_sorted(values):
    """Whether no value is smaller than the one before it."""
    for index in range(1, len(values)):
        if values[index] < values[index - 1]:
            return False
    return True


def largest(values):
    """The largest number of a list with at least one."""
    best = values[0]
    for value in values:
        if value > best:
            best = value
    return best


def letter_counts(text):
    """How often each letter occurs in a text, by letter."""
    counts = {}
    for letter in text:
        counts[letter] = counts.get(letter, 0) + 1
    return counts


def longest_run(values):
    """The length of the longest stretch of equal neighbours; 0 for an empty list."""
    longest = 0
    length = 0
    for index in range(len(values)):
        if index > 0 and values[index] == values[index - 1]:
            length += 1
        else:
            length = 1
        longest = max(longest, length)
    return longest


def merge_sorted(first, second):
    """One ascending list of the numbers of two ascending lists."""
    merged = []
    i = 0
    j = 0
    while i < len(first) and j < len(second):
        if first[i] <= second[j]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return merged + first[i:] + second[j:]


def most_profit(prices):
    """The most that buying once and selling later earns; 0 when nothing can be earned."""
    profit = 0
    lowest = prices[0]
    for price in prices:
        profit = max(profit, price - lowest)
        lowest = min(lowest, price)
    return profit


def power(base, exponent):
    """The base multiplied by itself exponent times; 1 for the exponent 0."""
    result = 1
    while exponent > 0:
        result *= base
        exponent -= 1
    return result


def rotate(values, steps):
    """The list with its last `steps` values moved to the front, one after the other."""
    if len(values) == 0:
        return []
    steps = steps % len(values)
    return values[len(values) - steps :] + values[: len(values) - steps]


def running_total(values):
    """At each place the sum of all values up to there."""
    totals = []
    total = 0
    for value in values:
        total += value
        totals.append(total)
    return totals


def second_largest(values):
    """The largest number below the largest one; None when there is none."""
    best = None
    second = None
    for value in values:
        if best is None or value > best:
            best, second = value, best
        elif value < best and (second is None or value > second):
            second = value
    return second


def transpose(rows):
    """The columns of a table, each as a row."""
    columns = []
    for index in range(len(rows[0])):
        columns.append([row[index] for row in rows])
    return columns


def two_sum(numbers, target):
    """The first two different indices, in order, whose numbers add up to target; None when there are none."""
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            if numbers[i] + numbers[j] == target:
                return (i, j)
    return None


def words_by_length(text):
    """The words of a text by their lengths, in order of appearance."""
    groups = {}
    for word in text.split():
        if len(word) not in groups:
            groups[len(word)] = []
        groups[len(word)].append(word)
    return groups
